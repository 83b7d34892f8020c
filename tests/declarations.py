"""Copies of sweeps with parts changed, for tests."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

from housekeeping import DropPartitions, Rows, Sweep, TableStage

_LIMITS: Final = ("batch", "runtime", "resume", "rows_per_s", "rest", "batch_takes", "throttle")
_GUARD: Final = {"times_history": "times_history", "share": "share", "first_run": "first_run", "guard_action": "action"}
_ROWS: Final = ("table", "stale", "action", "order", "age", "hold", "event", "log")


def changed(sweep: Sweep, **changes: Any) -> Sweep:
    """Return a copy of a sweep with these parts changed, wherever they belong: ``batch`` is one of its limits.

    ``guard_action`` is the action of its guard; ``enabled`` is its state.
    """
    own = dict(changes)
    limits = {name: own.pop(name) for name in _LIMITS if name in own}
    guard = {field: own.pop(name) for name, field in _GUARD.items() if name in own}
    rows = {name: own.pop(name) for name in _ROWS if name in own}
    if "enabled" in own:
        own["setup"] = replace(sweep.setup, enabled=own.pop("enabled"))
    if "options" in own:
        own["options"] = {**sweep.options, **own["options"]}
    if limits:
        own["limits"] = replace(sweep.limits, **limits)
    if guard:
        own["guard"] = replace(sweep.guard, **guard)
    if rows.keys() == {"age"} and not isinstance(sweep.stages, Rows):
        own["options"] = {**own.get("options", sweep.options), "stale_after_s": rows["age"].total_seconds()}
    elif rows:
        own["stages"] = replace(only(sweep), **rows)
    return replace(sweep, **own)


def stage_of(sweep: Sweep) -> TableStage:
    """Return the only stage of a sweep, as a run has it."""
    (stage,) = sweep.declared_stages()
    assert isinstance(stage, TableStage)
    return stage


def only(sweep: Sweep) -> Any:
    """Return the only stage of a sweep, as it was declared."""
    stages = sweep.stages if isinstance(sweep.stages, list | tuple) else (sweep.stages,)
    (stage,) = stages
    assert isinstance(stage, Rows | DropPartitions)
    return stage
