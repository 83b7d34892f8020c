"""State of a worker and its next tick. Apart from its status, so that `housekeeping list` imports little."""

from __future__ import annotations

from datetime import datetime
from typing import Any, Literal

from housekeeping.core.cron import Cron
from housekeeping.sweeps.declaration import Sweep
from housekeeping.sweeps.ledger.overrides import Override
from housekeeping.sweeps.setup_problem import SetupProblem

State = Literal["on", "paused", "narrow", "disabled", "not_set_up"]


def state_of(sweep: Sweep, switch: Override | None, problem: SetupProblem | None = None) -> State:
    """Return whether the worker is active, paused, narrowed, disabled or not set up."""
    if problem is not None:
        return "not_set_up"
    return "disabled" if not sweep.enabled else switch.state if switch is not None else "on"


def next_tick(sweep: Sweep, now: datetime, zone: Any, switch: Override | None = None) -> datetime | None:
    """Return the next tick that is not skipped, in UTC; None without one: no schedule, disabled, or paused."""
    if not (sweep.schedule and sweep.enabled):
        return None
    if switch is not None and switch.state == "paused":
        return Cron(sweep.schedule, zone).next(switch.until) if switch.until else None
    return Cron(sweep.schedule, zone).next(now)
