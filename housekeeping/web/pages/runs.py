"""Pages of the runs: the list with filters, and one run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final, get_args

from flask import Flask, abort, render_template, request
from werkzeug.datastructures import MultiDict

from housekeeping.core.clock import SYSTEM_CLOCK
from housekeeping.core.errors import WrongArgument
from housekeeping.core.sanitize import error_line
from housekeeping.database.clock_skew import database_now
from housekeeping.database.connection import database
from housekeeping.presentation.time_parsing import parse_since
from housekeeping.sweeps.insight.explain import explain_run
from housekeeping.sweeps.insight.run_progress import Progress, progress_of
from housekeeping.sweeps.ledger import history
from housekeeping.sweeps.ledger.history import RunRecord, parse_run_label
from housekeeping.sweeps.ledger.run_list import RUNNING, Position, RunFilter, RunPage, read_page
from housekeeping.sweeps.ledger.runs import Outcome, Trigger
from housekeeping.web.snapshot import SnapshotCache

_ROWS: Final = 50  # runs of a page
_LONGEST: Final = 200  # characters of a field
OUTCOMES: Final = (*get_args(Outcome), RUNNING)
TRIGGERS: Final = get_args(Trigger)


@dataclass(slots=True)
class RunForm:
    """Filter fields of the list as they were sent, with an error for each wrong one.

    Attributes:
      values: Text by field: worker, outcome, trigger, since, until, database.
      errors: Error by field.
      wanted: The filter; its wrong fields are missing.
      names: The databases to read.
    """

    values: dict[str, str]
    names: Sequence[str] = ()
    wanted: RunFilter = field(default_factory=RunFilter)
    errors: dict[str, str] = field(default_factory=dict)

    @classmethod
    def read(cls, sent: MultiDict[str, str], sweeps: dict[str, Any]) -> RunForm:
        """Return the form that the page's address contains."""
        known = ("worker", "outcome", "trigger", "since", "until", "database")
        form = cls({name: sent.get(name, "").replace("\0", "").strip()[:_LONGEST] for name in known})
        worker = form.values["worker"] or None
        now = SYSTEM_CLOCK.now()
        form.wanted = RunFilter(
            worker,
            form._choice("outcome", OUTCOMES),
            form._choice("trigger", TRIGGERS),
            form._time("since", now),
            form._time("until", now),
        )
        only = form._choice("database", tuple(database.by_name()))
        if only is None and worker in sweeps:
            only = sweeps[worker].database
        form.names = tuple(database.by_name()) if only is None else (only,)
        return form

    @property
    def given(self) -> dict[str, str]:
        """The fields that are not empty, as parameters for the URL of the next page."""
        return {name: value for name, value in self.values.items() if value}

    def _choice(self, name: str, choices: Sequence[str]) -> str | None:
        value = self.values[name] or None
        if value is not None and value not in choices:
            self.errors[name] = f"{value!r} is none of {', '.join(choices)}"
            return None
        return value

    def _time(self, name: str, now: datetime) -> datetime | None:
        if not self.values[name]:
            return None
        try:
            return parse_since(self.values[name], now)
        except WrongArgument as error:
            self.errors[name] = error_line(error)
            return None


def add_runs(app: Flask, snapshots: SnapshotCache) -> None:
    """Register the pages."""

    @app.get("/runs")
    def runs() -> tuple[str, int]:
        form = RunForm.read(request.args, snapshots.sweeps)
        sent = request.args.get("before", "")
        before = None if not sent else _position(sent) or abort(404, "this page of the list does not exist")
        page = RunPage() if form.errors else read_page(form.names, lambda now: form.wanted, limit=_ROWS, before=before)
        older = {**form.given, "before": _address(page.runs[-1])} if page.more else None
        shown = render_template(
            "runs.html",
            form=form,
            page=page,
            older=older,
            first=before is None,
            workers=sorted(snapshots.sweeps),
            outcomes=OUTCOMES,
            triggers=TRIGGERS,
            databases=tuple(database.by_name()),
            live=before is None and not form.errors,
        )
        return shown, 400 if form.errors else 200

    @app.get("/runs/<label>")
    def run(label: str) -> str:
        name, run_id = parse_run_label(label) or abort(404)
        if name not in database.by_name():
            abort(404, "no database has this name")
        with snapshots.reading(name):
            row = history.find(run_id) or abort(404, "no run has this id, or it is older than 30 days")
            sweep = snapshots.sweeps.get(row.worker)
            now = database_now()
            answer = explain_run(row, sweep, now, snapshots.settings.timezone)
            attempts = history.attempts_of(row) + ([] if row.tick is None else history.at_tick(row.worker, row.tick))
            failures = history.failures_of(run_id)
        return render_template(
            "run.html",
            run=row,
            # A purge or a restore is not declared, nor a worker of an earlier release.
            is_declared=sweep is not None,
            answer=answer,
            failures=failures,
            progress=_progress(snapshots, row, now),
            attempts=sorted({each.run_id: each for each in attempts}.values(), key=lambda each: each.run_id),
            live=row.outcome is None,
        )


def _progress(snapshots: SnapshotCache, row: RunRecord, now: datetime) -> Progress | None:
    """Return the progress of an open run; only a worker's last run has a total and a time left."""
    sweep = snapshots.sweeps.get(row.worker)
    if row.outcome is not None or row.lost or sweep is None:
        return None
    known = snapshots.current().progress.get(row.worker)
    if known is not None and known.run_id == row.run_id:
        return known
    return progress_of(sweep, row.counts, None, (now - row.started_at).total_seconds(), row.run_id)


def _address(run: RunRecord) -> str:
    """Return a run's position in the list as text for the address of a page."""
    return f"{run.started_at.isoformat()}_{run.database}_{run.run_id}"


def _position(text: str) -> Position | None:
    at, _, rest = text.partition("_")
    name, _, number = rest.rpartition("_")
    try:
        started_at, run_id = datetime.fromisoformat(at), int(number)
    except ValueError:
        return None
    in_range = name in database.by_name() and 0 < run_id < 2**63 and started_at.tzinfo is not None
    return Position(started_at, name, run_id) if in_range else None
