"""Fields of a `Sweep` that do not depend on the kind of its table, for type checkers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypedDict

if TYPE_CHECKING:
    from blinker import NamedSignal
    from peewee import Model

    from housekeeping.sweeps.declaration import DataConsistency
    from housekeeping.sweeps.lease_config import LeaseConfig
    from housekeeping.sweeps.limits.declared import AlertThresholds, Breaker, ThrottleLimits
    from housekeeping.sweeps.setup_problem import SetupProblem
    from housekeeping.sweeps.stages.row_log import RowLog
    from housekeeping.sweeps.stages.stage import Preflight


class SweepOptions(TypedDict, total=False):
    """Keyword arguments that `Sweep.on` passes on to `Sweep`; a test compares the two."""

    always_stale: bool
    event: NamedSignal | None
    row_log: RowLog | None
    stage_name: str
    counts: tuple[str, ...]
    progress_counts: tuple[str, ...]
    schedule: str | None
    batch_size: int
    max_runtime: timedelta
    max_rows_per_s: float | None
    rest: float
    shards: int
    stale_after: timedelta | None
    lease: LeaseConfig | None
    before_lease: Preflight | None
    options: Mapping[str, Any]
    argument_name: str | None
    parse_argument: Callable[[str], Any]
    resume_after_limit: bool
    ignore_cursor: bool
    start_message: str | None
    rediscovered: bool
    queue: str
    alerts: AlertThresholds
    target_batch: timedelta | None
    throttle: ThrottleLimits
    breaker: Breaker
    confirm_first_run: bool
    feature_category: str
    data_consistency: DataConsistency
    actor_options: Mapping[str, Any]
    database: str
    partitioned: tuple[type[Model], ...]
    enabled: bool
    setup_problem: Callable[[], SetupProblem | None] | None
