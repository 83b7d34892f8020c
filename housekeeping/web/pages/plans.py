"""Pages of a plan: what a run would do, its confirmation, and the message that was sent."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from datetime import tzinfo
from typing import Any, Final

from flask import Flask, abort, flash, redirect, render_template, request, url_for
from werkzeug.wrappers import Response

from housekeeping.core.sanitize import in_one_line
from housekeeping.database.connection import database, translate_postgres_errors
from housekeeping.presentation.enqueueing import reason_to_skip, send_run
from housekeeping.presentation.workers import parse_argument, translate_table_errors
from housekeeping.sweeps.declaration import Sweep
from housekeeping.sweeps.insight.outgrown import stale_if_outgrown
from housekeeping.sweeps.insight.plan import Plan
from housekeeping.sweeps.insight.plan import plan as make_plan
from housekeeping.sweeps.ledger import history
from housekeeping.sweeps.ledger.action_log import record_action
from housekeeping.sweeps.limits.breaker import with_argument
from housekeeping.sweeps.stages.stage import Backlog
from housekeeping.web.broker import LazyBroker
from housekeeping.web.security import current_user
from housekeeping.web.snapshot import SnapshotCache

#: Maximum number of records counted per stage of a plan, so that its page loads quickly.
_COUNTED: Final = 100_000
_LONGEST_ID: Final = 200  # characters of a message id


@dataclass(frozen=True, slots=True)
class _Seen:
    """What the confirmation page shows of the plan, and its form sends back."""

    stale: Backlog
    argument: str | None

    @classmethod
    def of_request(cls) -> _Seen:
        values = request.form if request.method == "POST" else request.args
        argument = _argument(values.get("argument", ""))
        if request.method == "POST" and "rows" not in values:
            return cls(Backlog(0, exact=False), argument)  # a program that has seen no plan
        rows = values.get("rows", "")
        if not (rows.isascii() and rows.isdecimal() and len(rows) < 16):
            abort(400, "the form lacks the number of rows; open the plan again")
        return cls(Backlog(int(rows), "exact" in values), argument)


class _Plans:
    """Plans for the pages, one at a time: repeated clicks must not occupy all threads and the database."""

    def __init__(self, zone: tzinfo) -> None:
        self._zone = zone
        self._counting = threading.Lock()

    def make(self, sweep: Sweep, argument: Any) -> Plan:
        if not self._counting.acquire(blocking=False):
            abort(503, "another plan is being computed; reload this page in a moment")
        try:
            with translate_table_errors(sweep):
                return make_plan(sweep, argument, limit=_COUNTED, zone=self._zone)
        finally:
            self._counting.release()


def add_plans(app: Flask, snapshots: SnapshotCache, broker: LazyBroker) -> None:
    """Register the pages."""
    plans = _Plans(snapshots.settings.timezone)

    def show_plan(sweep: Sweep, argument: str | None, outgrown: str | None = None) -> str:
        planned = plans.make(sweep, parse_argument(sweep, argument))
        return render_template("plan.html", sweep=sweep, plan=planned, argument=argument, outgrown=outgrown)

    @app.get("/workers/<name>/plan")
    def plan(name: str) -> str:
        sweep = snapshots.sweep(name)
        # A plan loads the database, and a foreign page could make a browser request it.
        if request.headers.get("Sec-Fetch-Site", "none") not in ("same-origin", "none"):
            abort(403, "another site requested this page: open it from the worker's page")
        return show_plan(sweep, _argument(request.args.get("argument", "")))

    @app.get("/workers/<name>/run")
    def run_to_confirm(name: str) -> str:
        sweep, seen = snapshots.sweep(name), _Seen.of_request()
        parse_argument(sweep, seen.argument)
        return render_template("run_now.html", sweep=sweep, seen=seen, skipped=_reason_to_skip(sweep))

    @app.post("/workers/<name>/run")
    def run_now(name: str) -> Response | tuple[str, int]:
        sweep, seen = snapshots.sweep(name), _Seen.of_request()
        argument = parse_argument(sweep, seen.argument)
        with translate_table_errors(sweep):
            stale = stale_if_outgrown(sweep, argument, seen.stale)
        if stale is not None:
            found = f"{stale} rows are stale" if stale.rows else "the stale rows could not be counted"
            text = f"Nothing was enqueued: you confirmed a plan of {seen.stale} rows, and now {found}."
            return show_plan(sweep, seen.argument, text), 409
        with record_action("run", with_argument(name, seen.argument), current_user()) as outcome:
            sent = send_run(broker.get(), sweep, argument)
            outcome.result = str(sent)
        snapshots.invalidate()
        flash(f"{sweep.name} {sent}.")
        return redirect(url_for("sent_run", name=name, id=sent.duplicate_of or sent.message_id), 303)

    @app.get("/workers/<name>/message")
    def sent_run(name: str) -> str:
        sweep, message_id = snapshots.sweep(name), in_one_line(request.args.get("id", ""), _LONGEST_ID)
        with snapshots.reading(sweep.database):
            runs = [run for run in history.attempts_at(message_id) if run.worker == name]
        current = snapshots.current()
        return render_template(
            "sent_run.html",
            sweep=sweep,
            message_id=message_id,
            runs=runs,
            skipped=None if runs else _reason_to_skip(sweep),
            alerts=[] if runs else [each for each in current.alerts if each.name == "no_worker"],
            lengths=current.queues.get(sweep.queue),
            live=True,
        )


def _argument(text: str) -> str | None:
    return text.strip() or None


def _reason_to_skip(sweep: Sweep) -> str | None:
    with database.using(sweep.database), translate_postgres_errors():
        return reason_to_skip(sweep)
