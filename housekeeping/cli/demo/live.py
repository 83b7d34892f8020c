"""The live view: per worker how it stands, and the last runs as the ledger has them."""

from __future__ import annotations

import subprocess
import threading
import time
from contextlib import nullcontext
from typing import Final

from rich.console import Group
from rich.live import Live
from rich.text import Text

from housekeeping.brokers import redis_broker
from housekeeping.cli.demo.once import to_be_sent
from housekeeping.cli.demo.runs import runs_table
from housekeeping.cli.demo.scenes import Counted, compared, counted
from housekeeping.cli.demo.stage import Stage
from housekeeping.cli.status import workers_table
from housekeeping.cli.tables import out
from housekeeping.foundation.clock_skew import database_now
from housekeeping.installation import install
from housekeeping.sweeps.overview import overview
from housekeeping.sweeps.own_tables import Run

_POLL_S: Final = 0.1
_REFRESH_S: Final = 0.5
_RUNS: Final = 8
_QUIET_REFRESH_S: Final = 10  # between two pictures where there is no terminal to redraw


def watch(stage: Stage, processes: dict[str, subprocess.Popen[bytes]], told: threading.Event) -> None:
    """Show what the processes do until Ctrl-C, or until it is told to end.

    Raises:
      HousekeepingError: When a process ends.
      KeyboardInterrupt: At the end that is asked for.
    """
    # So that there is something to see at once; from the next whole minute on, the scheduler sends.
    before = counted()
    for actor in to_be_sent(install(redis_broker(stage.settings), stage.settings)).values():
        actor.send()
    with Live(console=out, auto_refresh=False) if out.is_terminal else nullcontext() as live:
        due_at = time.monotonic()
        while not told.is_set():
            stage.check(processes)
            if time.monotonic() >= due_at:
                due_at += _REFRESH_S if live else _QUIET_REFRESH_S
                picture = _picture(stage, before)
                if live:
                    live.update(picture, refresh=True)
                else:
                    out.print(picture)
            told.wait(_POLL_S)
    raise KeyboardInterrupt


def _picture(stage: Stage, before: Counted) -> Group:
    now = database_now()
    return Group(
        workers_table([overview(sweep, now, stage.settings.timezone) for sweep in stage.sweeps.values()], now),
        compared(before, counted()),
        Text(),
        runs_table(Run.select().order_by(Run.id.desc()).limit(_RUNS), stage.sweeps),
        Text("\nCtrl-C ends the demo", style="dim"),
    )
