"""Page of the processes: workers and schedulers with their current runs."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Final

from flask import Flask, render_template

from housekeeping.core.redis.client import redis_client
from housekeeping.database.connection import database
from housekeeping.sweeps.ledger.history import RunRecord
from housekeeping.sweeps.ledger.run_list import RUNNING, RunFilter, read_page
from housekeeping.sweeps.processes.heartbeats import Process, read_processes
from housekeeping.web.snapshot import SnapshotCache

_RUNS: Final = 500  # open runs that are read
#: Redis dates the start of a process and the database that of a run, and their clocks differ a little.
_CLOCK_NOISE: Final = timedelta(seconds=5)


def add_processes(app: Flask, snapshots: SnapshotCache) -> None:
    """Register the page."""

    @app.get("/processes")
    def processes() -> str:
        settings = snapshots.settings
        open_runs = read_page(tuple(database.by_name()), lambda now: RunFilter(outcome=RUNNING), limit=_RUNS)
        client = None if settings.redis_url is None else redis_client(settings.redis_url)
        found = read_processes(client, settings.namespace, open_runs.now)
        shown, others = by_process(found.listed, open_runs.runs)
        return render_template(
            "processes.html",
            found=found,
            shown=shown,
            others=others,
            unavailable=open_runs.unavailable,
            more=open_runs.more,
            now=open_runs.now,
            live=True,
        )


def by_process(
    processes: Sequence[Process], runs: Sequence[RunRecord]
) -> tuple[list[tuple[Process, list[RunRecord]]], list[RunRecord]]:
    """Return each process with its runs, and the runs of no listed process: started by hand, or of one long dead."""
    taken: dict[int, list[RunRecord]] = {place: [] for place in range(len(processes))}
    others: list[RunRecord] = []
    for run in runs:
        # A process id is used again, in containers at once. The run belongs to the last process that began before it.
        owners = [
            (process.started_at, place)
            for place, process in enumerate(processes)
            if process.name == run.process and process.started_at <= run.started_at + _CLOCK_NOISE
        ]
        (taken[max(owners)[1]] if owners else others).append(run)
    return [(process, taken[place]) for place, process in enumerate(processes)], others
