"""Parts of texts for people: numbers with nouns, durations, and how to install an extra."""

from __future__ import annotations

from typing import Final

import housekeeping

#: The distribution's name. The name of the import package belongs to another project on the public index.
DISTRIBUTION: Final = "dramatiq-housekeeping"


def counted(number: float, noun: str, nouns: str | None = None) -> str:
    """Return the number and its noun: ``1 error``, ``0 errors``, ``1,234 queries``.

    Parameters:
      nouns: The plural, if it is not the noun followed by an s.
    """
    return f"{number:,} {noun if number == 1 else nouns or f'{noun}s'}"


def format_duration(seconds: float | None) -> str:
    """Return a duration in the unit that fits: ``12 ms``, ``3.4 s``, ``5 min``, ``2 h``, ``3 d``."""
    if seconds is None:
        return "-"
    if seconds < 0.9995:
        return f"{max(0, seconds) * 1000:.0f} ms"
    for unit, size, limit in (("s", 1, 60), ("min", 60, 60), ("h", 3_600, 48)):
        # Compare the rounded number, so that 59.96 s becomes 1 min instead of 60.0 s.
        if round(seconds / size, 1) < limit:
            return f"{seconds / size:.1f}".removesuffix(".0") + f" {unit}"
    return f"{seconds / 86_400:,.1f}".removesuffix(".0") + " d"


def how_to_install(extra: str) -> str:
    """Return the commands that install `extra`, for the end of an error message of one line."""
    wheel = f"{DISTRIBUTION.replace('-', '_')}-{housekeeping.__version__}-py3-none-any.whl"
    return (
        f"pip install '.[{extra}]' in a clone, pip install '{wheel}[{extra}]' with the wheel, "
        f"or pip install '{DISTRIBUTION}[{extra}]' once it is released"
    )
