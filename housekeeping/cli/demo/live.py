"""The live view: per worker how it stands, and the last runs as the ledger has them."""

from __future__ import annotations

import subprocess
import time
from datetime import UTC, datetime
from typing import Final

from rich.console import Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from housekeeping.brokers import redis_broker
from housekeeping.cli.demo import statuses
from housekeeping.cli.demo.stage import Stage
from housekeeping.cli.status import workers_table
from housekeeping.cli.tables import counts, length, out, table
from housekeeping.installation import install
from housekeeping.sweeps.ledger import Run
from housekeeping.sweeps.overview import overview

_REFRESH_S: Final = 0.5
_RUNS: Final = 8
_QUIET_REFRESH_S: Final = 10  # between two pictures where there is no terminal to redraw


def watch(stage: Stage, processes: dict[str, subprocess.Popen[bytes]]) -> None:
    """Show what the processes do until Ctrl-C.

    Raises:
      HousekeepingError: When a process ends.
    """
    # So that there is something to see at once; from the next whole minute on, the scheduler sends.
    for actor in install(redis_broker(stage.settings), stage.settings).values():
        actor.send()
    terminal = out.is_terminal
    with Live(console=out, auto_refresh=False, transient=False) as live:
        while True:
            for name, process in processes.items():
                stage.check(name, process)
            picture = Group(_workers(stage), _statuses(), _runs(), Text("\nCtrl-C ends the demo", style="dim"))
            if terminal:
                live.update(picture, refresh=True)
            else:
                out.print(picture)
            time.sleep(_REFRESH_S if terminal else _QUIET_REFRESH_S)


def _workers(stage: Stage) -> Table:
    now = datetime.now(UTC)
    return workers_table([overview(sweep, now, stage.settings.timezone) for sweep in stage.sweeps.values()], now)


def _statuses() -> Table:
    shown = table("USER STATUSES", ">ROWS", title="")
    for kind, rows in statuses.counted().items():
        note = f" (with {statuses.LOCKED} locked by another session)" if kind == "due" else ""
        shown.add_row(f"{kind}{note}", f"{rows:,}")
    return shown


def _runs() -> Table:
    shown = table("RUN", "WORKER", "SENT BY", "STARTED (UTC)", "OUTCOME", ">TOOK", "COUNTS", title="")
    for run in Run.select().order_by(Run.id.desc()).limit(_RUNS):
        took = length((run.finished_at - run.started_at).total_seconds()) if run.finished_at else "-"
        shown.add_row(
            str(run.id),
            run.worker,
            run.trigger,
            run.started_at.strftime("%H:%M:%S"),
            run.outcome or "running",
            took,
            counts(run.counts),
        )
    return shown
