"""Keeps a PostgreSQL application clean: five workers on Dramatiq, the middleware under them, the means to see it."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from housekeeping.foundation.leases import ExclusiveLease as ExclusiveLease
    from housekeeping.installation import install as install

__version__ = "0.1.0"

#: Public names and where they live; looked up when first used, so that importing the package costs and changes nothing.
_PUBLIC: Final = {
    "ExclusiveLease": "housekeeping.foundation.leases",
    "install": "housekeeping.installation",
}
__all__ = ["ExclusiveLease", "__version__", "install"]


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        return getattr(importlib.import_module(_PUBLIC[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
