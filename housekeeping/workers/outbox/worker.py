"""The sweep that delivers the outbox, as a declaration."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Final

from housekeeping.sweeps.declaration import AlertThresholds, Sweep
from housekeeping.sweeps.limits.breaker import Breaker
from housekeeping.workers.outbox.delivery import OutboxStage

SCHEDULE: Final = "* * * * *"
BATCH_SIZE: Final = 100  # rows a claim: what a killed process delivers again, a minute later
MAX_RUNTIME: Final = timedelta(seconds=30)  # below the first delay, after which rows are claimed anew
LARGEST_BACKLOG: Final = 10_000  # rows; a hundred of the largest batches

#: None of the application's.
MODELS: Final[dict[str, Any]] = {}

#: Nor rights on any.
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
    # After an outage of a handler far more than usual waits, and is to be delivered.
    breaker=Breaker(times_history=None),
    confirm_first_run=False,
)

SWEEPS: Final = (sweep,)
