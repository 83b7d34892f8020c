"""Pages of the runs, of the processes with their current runs, of the operators' actions, and of erasures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Final, get_args

from flask import Flask, abort, flash, jsonify, redirect, render_template, request, url_for
from werkzeug.wrappers import Response

from housekeeping.core.errors import WrongArgument
from housekeeping.core.settings import Settings
from housekeeping.database.connection import database, translate_postgres_errors
from housekeeping.database.queries import database_now
from housekeeping.engine.restore import MOST_ARCHIVED, undo_of
from housekeeping.insight.erasures import find_erasure, read_erasures
from housekeeping.insight.trends import Progress, progress_of_run
from housekeeping.insight.why import explain_run
from housekeeping.ledger import history
from housekeeping.ledger.history import RUNNING, RunFilter, RunPage, RunPosition, RunRecord, read_page
from housekeeping.ledger.operators import logged_actions, record_action
from housekeeping.ledger.processes import Process, Processes, heartbeat_store, read_processes
from housekeeping.ledger.runs import Outcome, Trigger
from housekeeping.ledger.schema import page_of, parse_run_label
from housekeeping.web.security import Form, current_user
from housekeeping.web.snapshot import SnapshotCache

_SHOWN: Final = 50  # runs, actions or erasures on a page


def add_action_log(app: Flask) -> None:
    """Register the page."""

    @app.get("/actions")
    def actions() -> tuple[str, int]:
        return _list("actions.html", logged_actions, "target", "user")


def _list(template: str, read: Callable[..., Sequence[Any]], *names: str) -> tuple[str, int]:
    """Return one page of rows with ids as HTML, and its HTTP status. Fields of the form filter it, and times."""
    form = Form(request.args, *names, "since", "until")
    (since, until), before = form.times(), request.args.get("before", type=int)
    limit, typed = 0 if form.errors else _SHOWN + 1, {name: form.typed.get(name) for name in names}
    shown, older = page_of(read(limit, before=before, since=since, until=until, **typed), _SHOWN)
    return render_template(template, shown=shown, older=older, form=form), 400 if form.errors else 200


def add_erasures(app: Flask, settings: Settings) -> None:
    """Register the list of erasures and their receipts. Neither identifies a subject."""

    @app.get("/erasures")
    def erasures() -> tuple[str, int]:
        return _list("erasures.html", read_erasures, "subject")

    @app.get("/erasures/<int:number>/receipt.json")
    def receipt(number: int) -> Response:
        try:
            found = find_erasure(str(number))
        except WrongArgument:
            abort(404, "no erasure has this ID")
        return jsonify(found.receipt(settings.require_erasure_key()))


_RUNS: Final = 500  # open runs that are read
#: The start of a process may be by Redis's clock, that of a run is by the database's. The clocks differ a little.
_CLOCK_NOISE: Final = timedelta(seconds=5)


def add_processes(app: Flask, snapshots: SnapshotCache) -> None:
    """Register the page."""

    @app.get("/processes")
    def processes() -> str:
        settings = snapshots.settings

        def read() -> tuple[RunPage, Processes]:
            open_runs = read_page(tuple(database.by_name()), lambda now: RunFilter(outcome=RUNNING), limit=_RUNS)
            return open_runs, read_processes(heartbeat_store(settings), open_runs.now)

        open_runs, found = snapshots.shared("processes", read)
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


_KEYS: Final = 100  # archived rows of a page, of each table
OUTCOMES: Final = (*get_args(Outcome), RUNNING)
TRIGGERS: Final = get_args(Trigger)


def add_runs(app: Flask, snapshots: SnapshotCache) -> None:
    """Register the pages."""

    def find(label: str) -> RunRecord:
        name, run_id = parse_run_label(label) or abort(404)
        if name not in database.by_name():
            abort(404, "no database has this name")
        with snapshots.reading(name):
            return history.find(run_id) or abort(404, "no run has this id, or it is older than 30 days")

    def read(label: str, skip: int) -> tuple[RunRecord, dict[str, Any]]:
        row = find(label)
        sweep = snapshots.sweeps.get(row.worker)
        with snapshots.reading(row.database):
            answer = explain_run(row, sweep, database_now(), snapshots.settings.timezone)
            attempts = history.attempts_of(row) + ([] if row.tick is None else history.at_tick(row.worker, row.tick))
            return row, {
                # A purge or a restore is not declared, nor a worker of an earlier release.
                "is_declared": sweep is not None,
                "answer": answer,
                "failures": history.failures_of(row.run_id),
                "undo": undo_of(row, snapshots.sweeps, skip=skip, limit=_KEYS),
                "attempts": sorted({each.run_id: each for each in attempts}.values(), key=lambda each: each.run_id),
            }

    @app.get("/runs")
    def runs() -> tuple[str, int]:
        form = Form(request.args, "worker", "outcome", "trigger", "since", "until", "database")
        worker = form.typed.get("worker")
        wanted = RunFilter(worker, form.choice("outcome", OUTCOMES), form.choice("trigger", TRIGGERS), *form.times())
        only = form.choice("database", tuple(database.by_name()))
        if only is None and worker in snapshots.sweeps:
            only = snapshots.sweeps[worker].database
        names = tuple(database.by_name()) if only is None else (only,)
        sent = request.args.get("before")
        before = None if sent is None else RunPosition.of(find(sent))
        page = RunPage()
        if not form.errors:
            page = snapshots.shared(
                ("runs", names, wanted, before),
                lambda: read_page(names, lambda now: wanted, limit=_SHOWN, before=before),
            )
        shown = render_template(
            "runs.html",
            form=form,
            page=page,
            workers=sorted(snapshots.sweeps),
            outcomes=OUTCOMES,
            triggers=TRIGGERS,
            databases=tuple(database.by_name()),
            live=before is None and not form.errors,
        )
        return shown, 400 if form.errors else 200

    @app.get("/runs/<label>")
    def run(label: str) -> str:
        skip = max(0, min(request.args.get("skip", 0, type=int), MOST_ARCHIVED))
        row, known = snapshots.shared(("run", label, skip), lambda: read(label, skip))
        progress = _progress(snapshots, row)
        return render_template("run.html", run=row, skip=skip, progress=progress, live=row.outcome is None, **known)

    @app.post("/runs/<label>/stop")
    def stop(label: str) -> Response:
        row = find(label)
        with record_action("stop", row.label, current_user()) as outcome:
            with database.using(row.database), translate_postgres_errors():
                _, outcome.result = history.stop(row, current_user())
        snapshots.invalidate()
        flash(f"{outcome.result[:1].upper()}{outcome.result[1:]}.")
        return redirect(url_for("run", label=row.label), 303)


def _progress(snapshots: SnapshotCache, row: RunRecord) -> Progress | None:
    """Return the progress of an open run; only a worker's last run has a total and a time left."""
    sweep = snapshots.sweeps.get(row.worker)
    if row.outcome is not None or row.lost or sweep is None:
        return None
    known = snapshots.current().progress.get(row.worker)
    if known is not None and known.run_id == row.run_id:
        return known
    return progress_of_run(sweep, row)
