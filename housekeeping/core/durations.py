"""Durations as text."""

from __future__ import annotations


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
