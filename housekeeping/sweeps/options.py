"""The fields of a `Sweep` that say the same on any table, for type checkers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypedDict

if TYPE_CHECKING:
    from blinker import NamedSignal
    from peewee import Model

    from housekeeping.sweeps.declaration import Alarms, DataConsistency, LeaseTerms, SetupProblem
    from housekeeping.sweeps.limits.breaker import Breaker
    from housekeeping.sweeps.limits.throttle import Gates
    from housekeeping.sweeps.stages.stage import Preflight


class SweepOptions(TypedDict, total=False):
    """What `Sweep.on` passes on to `Sweep`; a test compares the two."""

    always_stale: bool
    event: NamedSignal | None
    counts: tuple[str, ...]
    settles: tuple[str, ...]
    schedule: str | None
    batch_size: int
    max_runtime: timedelta
    parts: int
    stale_after: timedelta | None
    lease: LeaseTerms | None
    before_lease: Preflight | None
    options: Mapping[str, Any]
    takes_argument: str | None
    read_argument: Callable[[str], Any]
    goes_round: bool
    starts_over: bool
    starts_with: str | None
    rediscovered: bool
    queue: str
    alarms: Alarms
    target_batch: timedelta | None
    gates: Gates
    breaker: Breaker
    confirm_first_run: bool
    feature_category: str
    data_consistency: DataConsistency
    actor_options: Mapping[str, Any]
    partitioned: tuple[type[Model], ...]
    enabled: bool
    setup_problem: Callable[[], SetupProblem | None] | None
