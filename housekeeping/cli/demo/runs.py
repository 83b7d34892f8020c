"""The last runs, as the ledger has them."""

from __future__ import annotations

from rich.table import Table

from housekeeping.cli.tables import counts, length, table
from housekeeping.sweeps.declaration import Sweep
from housekeeping.sweeps.ledger import Run
from housekeeping.sweeps.walk import in_order


def runs_table(sweeps: dict[str, Sweep], most: int) -> Table:
    """A line a run, the newest first."""
    shown = table("WORKER", "SENT BY", "STARTED", "OUTCOME", ">TOOK", "COUNTS", title="\nruns, from the ledger")
    for run in Run.select().order_by(Run.id.desc()).limit(most):
        shown.add_row(
            run.worker,
            run.trigger,
            run.started_at.strftime("%H:%M:%S"),
            f"{run.outcome}: {run.reason}" if run.reason else run.outcome or "running",
            length((run.finished_at - run.started_at).total_seconds()) if run.finished_at else "-",
            counts(in_order(sweeps[run.worker], run.counts)),
        )
    return shown
