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
from housekeeping.cli.demo.once import to_be_sent
from housekeeping.cli.demo.runs import runs_table
from housekeeping.cli.demo.scenes import compared, counted
from housekeeping.cli.demo.stage import Stage
from housekeeping.cli.status import workers_table
from housekeeping.cli.tables import out
from housekeeping.installation import install
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
    before = counted()
    for actor in to_be_sent(install(redis_broker(stage.settings), stage.settings)).values():
        actor.send()
    terminal = out.is_terminal
    with Live(console=out, auto_refresh=False, transient=False) as live:
        while True:
            for name, process in processes.items():
                stage.check(name, process)
            workers, changed = _workers(stage), compared(before, counted())
            way_out = Text("\nCtrl-C ends the demo", style="dim")
            picture = Group(workers, changed, runs_table(stage.sweeps, _RUNS), way_out)
            if terminal:
                live.update(picture, refresh=True)
            else:
                out.print(picture)
            time.sleep(_REFRESH_S if terminal else _QUIET_REFRESH_S)


def _workers(stage: Stage) -> Table:
    now = datetime.now(UTC)
    return workers_table([overview(sweep, now, stage.settings.timezone) for sweep in stage.sweeps.values()], now)
