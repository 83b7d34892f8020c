"""Declaration of the sweep that delivers the outbox."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Final

from housekeeping.sweeps.declaration import Sweep
from housekeeping.sweeps.limits.declared import AlertThresholds, Breaker
from housekeeping.workers.outbox.delivery import OutboxStage

SCHEDULE: Final = "* * * * *"
BATCH_SIZE: Final = 100  # rows per claim; after a kill they are delivered again, a minute later
MAX_RUNTIME: Final = timedelta(seconds=30)  # below the first retry delay, after which rows are claimed again
LARGEST_BACKLOG: Final = 10_000  # rows; a hundred full batches

#: No tables of the application.
MODELS: Final[dict[str, Any]] = {}

RIGHTS: Final[dict[str, tuple[str, ...]]] = {}

sweep: Final = Sweep(
    name="housekeeping.outbox",
    stages=lambda sweep: [OutboxStage(sweep.batch_size)],
    counts=("delivered_rows", "failed", "no_handler", "batches", "out_of_time"),
    progress_counts=("delivered_rows",),
    schedule=SCHEDULE,
    batch_size=BATCH_SIZE,
    max_runtime=MAX_RUNTIME,
    alerts=AlertThresholds(backlog=LARGEST_BACKLOG, most={"no_handler": 0}),
    # After an outage of a handler the backlog is far larger than usual, and all of it is to be delivered.
    breaker=Breaker(times_history=None),
    confirm_first_run=False,
)

SWEEPS: Final = (sweep,)
