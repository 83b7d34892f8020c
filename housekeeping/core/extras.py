"""How to install an extra of this package."""

from __future__ import annotations

from typing import Final

import housekeeping

#: The distribution's name. The name of the import package belongs to another project on the public index.
DISTRIBUTION: Final = "dramatiq-housekeeping"


def how_to_install(extra: str) -> str:
    """Return the commands that install `extra`, for the end of an error message of one line."""
    wheel = f"{DISTRIBUTION.replace('-', '_')}-{housekeeping.__version__}-py3-none-any.whl"
    return (
        f"pip install '.[{extra}]' in a clone, pip install '{wheel}[{extra}]' with the wheel, "
        f"or pip install '{DISTRIBUTION}[{extra}]' once it is released"
    )
