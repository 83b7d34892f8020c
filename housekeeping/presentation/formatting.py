"""Counts and times as text."""

from __future__ import annotations

from datetime import datetime
from typing import Any


def format_counts(counts: dict[str, Any]) -> str:
    """Return a run's counts in one line, without those that are zero."""
    return ", ".join(_count(name, value) for name, value in counts.items() if value) or "nothing to do"


def format_run_counts(outcome: str | None, counts: dict[str, Any]) -> str:
    """Return a run's counts in one line; ``-`` if they are zero and the run did not end as done or partial."""
    return format_counts(counts) if outcome in ("done", "partial") or any(counts.values()) else "-"


def _count(name: str, value: Any) -> str:
    if isinstance(value, bool | dict):  # the engine's own counts carry details, which the alerts show
        return name
    # A user's own stage may store something other than a number as a count.
    return f"{name} {value:,}" if isinstance(value, int | float) else f"{name} {value}"


def format_time(value: datetime | None, form: str = "%Y-%m-%d %H:%M:%S") -> str:
    """Return a time in UTC, to the second by default, or ``-`` for `None`."""
    return "-" if value is None else value.strftime(form)
