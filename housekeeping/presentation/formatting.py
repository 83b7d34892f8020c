"""Durations, counts and times as text."""

from __future__ import annotations

from datetime import datetime
from typing import Any


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


def format_counts(counts: dict[str, Any]) -> str:
    """Return a run's counts in one line, without those that are zero."""
    return ", ".join(_count(name, value) for name, value in counts.items() if value) or "nothing to do"


def _count(name: str, value: Any) -> str:
    if isinstance(value, bool | dict):  # the engine's own counts carry details, which the alerts show
        return name
    # A user's own stage may store something other than a number as a count.
    return f"{name} {value:,}" if isinstance(value, int | float) else f"{name} {value}"


def format_time(value: datetime | None, form: str = "%Y-%m-%d %H:%M:%S") -> str:
    """Return a time in UTC, to the second by default, or ``-`` for `None`."""
    return "-" if value is None else value.strftime(form)
