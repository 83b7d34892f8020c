"""The sweep over the library's own ledger, as a declaration."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Final

from housekeeping.sweeps.actions import Delete
from housekeeping.sweeps.declaration import Sweep
from housekeeping.sweeps.own_tables import Run
from housekeeping.sweeps.table_pass import TablePass

SCHEDULE: Final = "20 3 * * *"  # once a day, at a quiet hour and beside the full ones
KEPT_FOR: Final = timedelta(days=30)  # design.md, State in PostgreSQL
BATCH_SIZE: Final = 1000  # rows a statement; they are small and nobody else holds them

#: None of the application's: the ledger is where the setting for the library's own schema says.
MODELS: Final[dict[str, Any]] = {}

#: Nor rights on any.
RIGHTS: Final[dict[str, tuple[str, ...]]] = {}

sweep: Final = Sweep(
    name="housekeeping.old_runs",
    passes=lambda sweep: [
        TablePass(
            name="runs",
            stale=lambda now: Run.finished_at < now - (sweep.stale_after or KEPT_FOR),
            order=(Run.finished_at, Run.id),
            action=Delete(rows_counted_as="deleted_rows"),
            batch_size=sweep.batch_size,
        )
    ],
    counts=("deleted_rows", "batches", "out_of_time"),
    settles=("deleted_rows",),
    schedule=SCHEDULE,
    batch_size=BATCH_SIZE,
    max_runtime=timedelta(seconds=60),
    stale_after=KEPT_FOR,
)

SWEEPS: Final = (sweep,)
