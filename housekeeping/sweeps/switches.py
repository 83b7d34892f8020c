"""Workers an operator has switched off for a while."""

from __future__ import annotations

from typing import Any

from housekeeping.sweeps.own_tables import NOW, Switch


def is_paused(worker: str) -> bool:
    """Whether the worker is paused now; a pause whose end has come is over."""
    paused = (Switch.worker == worker) & (Switch.state == "paused")
    lasts = Switch.until.is_null() | (Switch.until > NOW)
    return bool(Switch.select(Switch.worker).where(paused & lasts).exists())


def paused_workers() -> set[str]:
    """The names of all workers that are paused now."""
    lasts = Switch.until.is_null() | (Switch.until > NOW)
    rows: Any = Switch.select(Switch.worker).where((Switch.state == "paused") & lasts).tuples()
    return {worker for (worker,) in rows}
