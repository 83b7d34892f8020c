"""Live view: workers, changes and the last runs, as far as the terminal has room."""

from __future__ import annotations

import subprocess
import threading
import time
from contextlib import nullcontext
from typing import Final

from rich.console import Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from housekeeping.brokers import redis_broker
from housekeeping.cli.formatting import out
from housekeeping.cli.status_output import workers_table
from housekeeping.cli.tables import table
from housekeeping.core.wording import format_duration
from housekeeping.database.clock_skew import database_now
from housekeeping.demo.once import actors_without_argument, runs_table
from housekeeping.demo.scenes import Counted, compared, compared_beside, counted
from housekeeping.demo.stage import Stage
from housekeeping.installation import install
from housekeeping.presentation.formatting import format_backlog
from housekeeping.sweeps.insight.status import WorkerStatus
from housekeeping.sweeps.insight.statuses import worker_statuses
from housekeeping.sweeps.ledger.models import Run

_POLL_S: Final = 0.1
_REFRESH_S: Final = 0.5
_QUIET_REFRESH_S: Final = 10  # between two prints without a terminal
_QUIET_RUNS: Final = 8
#: Minimum width of a terminal for all columns of the tables.
_WIDE: Final = 120
#: Minimum lines for the runs with their header; other tables use the rest.
_LEAST_RUNS: Final = 6


def watch(
    stage: Stage, processes: dict[str, subprocess.Popen[bytes]], stop_requested: threading.Event, dashboard: str
) -> None:
    """Show the processes' work until Ctrl-C or until `stop_requested` is set.

    On a terminal this uses the whole screen, which is restored at the end.

    Parameters:
      dashboard: Its address and token, or how to install it.

    Raises:
      HousekeepingError: When a process ends.
      KeyboardInterrupt: When the end is requested.
    """
    before = counted()
    send_each_once(stage)
    with Live(console=out, auto_refresh=False, screen=True) if out.is_terminal else nullcontext() as live:
        due_at = time.monotonic()
        while not stop_requested.is_set():
            stage.check(processes)
            if time.monotonic() >= due_at:
                due_at += _REFRESH_S if live else _QUIET_REFRESH_S
                if live:
                    live.update(_screen(stage, before, dashboard, *out.size), refresh=True)
                else:
                    out.print(_all_tables(stage, before, dashboard))
            stop_requested.wait(_POLL_S)
    raise KeyboardInterrupt


def send_each_once(stage: Stage) -> None:
    """Enqueue one run of each worker; the scheduler enqueues from the next full minute on."""
    for actor in actors_without_argument(install(redis_broker(stage.settings), stage.settings)).values():
        actor.send()


def _all_tables(stage: Stage, before: Counted, dashboard: str) -> Group:
    """Return all tables in full, for output that is no terminal."""
    return Group(
        workers_table(_overviews(stage), database_now()),
        compared(before, counted()),
        Text(),
        runs_table(_last_runs(_QUIET_RUNS), stage.sweeps, wide=True),
        Text(),
        _footer(dashboard),
    )


def _screen(stage: Stage, before: Counted, dashboard: str, width: int, height: int) -> Group:
    """Return tables that fit: the last runs and the footer always, the others if there is room."""
    wide = width >= _WIDE
    room = height - 2  # the footer, and a line before it
    overviews = _overviews(stage)[: max(0, room - _LEAST_RUNS - 2)]  # below a header, above an empty line
    shown: list[RenderableType] = [_workers(overviews, wide), Text()] if overviews else []
    room -= len(overviews) + len(shown)
    changes, lines = compared_beside(before, counted())
    if wide and room - lines - 1 >= _LEAST_RUNS:
        shown += [changes, Text()]
        room -= lines + 1
    runs = _one_line_rows(runs_table(_last_runs(room - 1), stage.sweeps, wide=wide))
    runs.expand, runs.columns[-1].ratio = True, 1  # only the last column is cut
    padding = room - 1 - runs.row_count
    return Group(*shown, runs, *[Text()] * (padding + 1), _footer(dashboard))


def _workers(overviews: list[WorkerStatus], wide: bool) -> Table:
    now = database_now()
    if wide:
        return _one_line_rows(workers_table(overviews, now))
    shown = table("WORKER", ">BACKLOG", ">OLDEST ROW", ">NEXT TICK")
    for each in overviews:
        shown.add_row(
            each.worker,
            format_backlog(each, now),
            format_duration((now - each.oldest).total_seconds()) if hasattr(each.oldest, "tzinfo") else "-",
            "-" if each.next_tick is None else f"in {format_duration((each.next_tick - now).total_seconds())}",
        )
    return _one_line_rows(shown)


def _one_line_rows(shown: Table) -> Table:
    """Return the table with one line per row, cut at the terminal's width."""
    for column in shown.columns:
        column.no_wrap, column.overflow = True, "ellipsis"
    return shown


def _overviews(stage: Stage) -> list[WorkerStatus]:
    return worker_statuses(list(stage.sweeps.values()), database_now(), stage.settings.timezone)


def _last_runs(number: int) -> list[Run]:
    return list(Run.select().order_by(Run.id.desc()).limit(max(0, number)))


def _footer(dashboard: str) -> Text:
    return Text(f"Ctrl-C ends the demo; dashboard: {dashboard}", style="bold", no_wrap=True, overflow="ellipsis")
