"""Pages of the workers: the table on the first page, a worker, its plan, and the forms that pause, narrow or run it."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from typing import Any, Final

from flask import Flask, abort, flash, redirect, render_template, request, url_for
from werkzeug.wrappers import Response

from housekeeping.brokers import reach_broker
from housekeeping.core.cron import in_words
from housekeeping.core.errors import BrokerUnavailable, DatabaseUnavailable, RedisUnavailable, WrongArgument
from housekeeping.core.logs import counted, in_one_line
from housekeeping.core.settings import LARGEST_BATCH
from housekeeping.database.connection import database, translate_postgres_errors
from housekeeping.database.queries import database_now
from housekeeping.engine.guard import stale_if_outgrown, with_argument
from housekeeping.engine.restore import warning_of_restored_rows
from housekeeping.insight.plan import plan as make_plan
from housekeeping.insight.plan import with_alerts
from housekeeping.insight.status import WorkerStatus, by_trouble
from housekeeping.insight.why import reason_to_skip, send_run
from housekeeping.insight.wording import (
    format_ticks,
    next_ticks,
    parse_argument,
    parse_future_time,
    translate_table_errors,
)
from housekeeping.leases.renewal import lease_store
from housekeeping.ledger import history, operators
from housekeeping.ledger.leases import HeldLease, held_leases, release_lease
from housekeeping.ledger.operators import (
    KEPT,
    ActionName,
    Override,
    describe_switch,
    logged_actions,
    record_action,
)
from housekeeping.ledger.schema import ActionRow
from housekeeping.sweeps.declaration import Sweep
from housekeeping.sweeps.stage import Backlog
from housekeeping.web.security import Form, current_user
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


def add_plans(app: Flask, snapshots: SnapshotCache) -> None:
    """Register the pages."""
    counting = threading.Lock()  # one plan at a time: clicks must not occupy all threads and the database

    def show_plan(sweep: Sweep, argument: str | None, outgrown: str | None = None) -> str:
        parsed = parse_argument(sweep, argument)
        if not counting.acquire(blocking=False):
            abort(503, "another plan is being computed; reload this page in a moment")
        try:
            with translate_table_errors(sweep):
                planned = make_plan(sweep, parsed, limit=_COUNTED, settings=snapshots.settings)
                planned = with_alerts(planned, sweep, snapshots.current().alerts)
        finally:
            counting.release()
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
        unsendable = None
        try:
            reach_broker(snapshots.settings)
        except (RedisUnavailable, BrokerUnavailable) as error:
            unsendable = str(error)
        skipped = _reason_to_skip(sweep)
        return render_template("run_now.html", sweep=sweep, seen=seen, skipped=skipped, unsendable=unsendable)

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
            sent = send_run(snapshots.broker(), sweep, argument)
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


_RUNS: Final = 50  # in the list
_ACTIONS: Final = 10  # on it


class SentForm(Form):
    """Form of a worker's page.

    Attributes:
      name: The id of the form on its page.
    """

    def __init__(self, name: str) -> None:
        super().__init__(request.form, "reason", "until", "batch_size", "max_runtime_s", "rows_per_s")
        self.name = name


def worker_page(snapshots: SnapshotCache, name: str, sent: SentForm | None = None) -> str:
    """Return a worker's page.

    Parameters:
      sent: A form with errors, which the page shows beside its fields, with what was typed.
    """
    sweep, current = snapshots.sweep(name), snapshots.current()
    status, zone = current.statuses.get(name), snapshots.settings.timezone
    rows: Any = None
    actions: Sequence[ActionRow] = ()
    try:
        rows, actions = snapshots.shared(("worker", name), lambda: _runs_and_actions(snapshots, sweep))
    except DatabaseUnavailable:
        if name not in current.statuses:  # there is nothing else to show
            raise
    return render_template(
        "worker.html",
        sweep=sweep,
        snapshot=current,
        worker_status=status,
        schedule=None if sweep.schedule is None else f"{in_words(sweep.schedule)} ({sweep.schedule}, {zone})",
        ticks=format_ticks(next_ticks(sweep, current.at, zone, status.switch if status else None)),
        rows=rows,
        actions=actions,
        live=sent is None,
        sent=None if sent is None else sent.name,
        typed={} if sent is None else sent.typed,
        errors={} if sent is None else sent.errors,
    )


def _runs_and_actions(snapshots: SnapshotCache, sweep: Sweep) -> tuple[Any, Sequence[ActionRow]]:
    with snapshots.reading(sweep.database):
        rows = history.recent(sweep.name, _RUNS)
    return rows, logged_actions(_ACTIONS, target=sweep.name)


_LONGEST_REASON: Final = 200  # characters
_MOST_ROWS_PER_S: Final = 1_000_000


def add_actions(app: Flask, snapshots: SnapshotCache) -> None:
    """Register the routes of the forms."""
    _add_overrides(app, snapshots)
    _add_changes_of_all(app, snapshots)

    @app.get("/leases/release")
    def lease_to_release() -> str:
        lease = _held_lease(snapshots, request.args.get("key", ""))
        return render_template("lease.html", lease=lease, seen=_fingerprint(lease))

    @app.post("/leases/release")
    def release() -> Response:
        key = request.args.get("key", "")
        lease = _held_lease(snapshots, key)
        # The page sends the holder that it showed. Programs may name only the key.
        seen = request.form.get("seen")
        if seen is not None and seen != _fingerprint(lease):
            abort(409, "the lease has a new holder since the page was loaded; nothing was released")
        store = lease_store(snapshots.settings)
        with record_action("release_lease", key, current_user()) as outcome:
            release_lease(store, key, expected=None if seen is None else lease.token)
            outcome.result = f"released, held by {lease.holder}"
        snapshots.invalidate()
        flash(f"The lease {in_one_line(key, 100)} was released.")
        return redirect(url_for("front"), 303)


def _add_overrides(app: Flask, snapshots: SnapshotCache) -> None:
    def done(name: str, message: str) -> Response:
        snapshots.invalidate()
        flash(message)
        return redirect(url_for("worker", name=name), 303)

    def set_override(form: SentForm, override: Override) -> Response | tuple[str, int]:
        if form.errors:
            return worker_page(snapshots, override.worker, form), 400
        return done(override.worker, f"{_switch(snapshots, override)}.")

    @app.post("/workers/<name>/pause")
    def pause(name: str) -> Response | tuple[str, int]:
        form = SentForm("pause")
        until = form.read("until", _time_at(snapshots.sweep(name)))
        return set_override(form, Override(name, "paused", _reason(form), until, said_by=current_user()))

    @app.post("/workers/<name>/narrow")
    def narrow(name: str) -> Response | tuple[str, int]:
        form = SentForm("narrow")
        until = form.read("until", _time_at(snapshots.sweep(name)))
        batch_size = form.read("batch_size", _number_to(LARGEST_BATCH))
        max_runtime_s = form.read("max_runtime_s", _number_to(86_400))
        rows_per_s = form.read("rows_per_s", _number_to(_MOST_ROWS_PER_S))
        if form.typed.keys().isdisjoint(("batch_size", "max_runtime_s", "rows_per_s")):
            form.errors["batch_size"] = "nothing to narrow; give records per batch, seconds per run or rows per second"
        limits: dict[str, Any] = {"batch_size": batch_size, "max_runtime_s": max_runtime_s, "rows_per_s": rows_per_s}
        return set_override(form, Override(name, "narrow", _reason(form), until, said_by=current_user(), **limits))

    @app.post("/workers/<name>/resume")
    def resume(name: str) -> Response:
        return done(name, _resume(snapshots.sweep(name)))


def _switch(snapshots: SnapshotCache, override: Override, *, keep_pause: bool = False) -> str:
    """Replace a worker's override and record that; return the result."""
    action: ActionName = "pause" if override.state == "paused" else "narrow"
    with record_action(action, override.worker, current_user()) as outcome:
        with database.using(snapshots.sweep(override.worker).database), translate_postgres_errors():
            active = operators.switch(override, keep_pause=keep_pause)
        outcome.result = describe_switch(active, override)
    return outcome.result


def _resume(sweep: Sweep) -> str:
    """End a worker's override and record that; return the result with a warning."""
    name = sweep.name
    with record_action("resume", name, current_user()) as outcome:
        with database.using(sweep.database), translate_postgres_errors():
            warning = warning_of_restored_rows(name)
            ended = operators.resume(name)
        outcome.result = f"{name} {'resumes at its next tick' if ended else 'was neither paused nor narrowed'}"
    return f"{outcome.result}.{f' Warning: {warning}.' if warning else ''}"


#: Results of a change of all workers that are shown one by one.
_TOLD: Final = 5


def _add_changes_of_all(app: Flask, snapshots: SnapshotCache) -> None:
    """Register the pages that pause all workers, and resume those that are paused or narrowed."""

    def page(action: str, form: SentForm | None = None) -> str:
        return render_template(
            "all_workers.html",
            action=action,
            workers=[each for each in snapshots.current().statuses.values() if each.problem is None],
            typed={} if form is None else form.typed,
            errors={} if form is None else form.errors,
        )

    def changed(change: Callable[[Sweep], str], names: Iterable[str]) -> Response:
        """Change the workers one by one. Those of an unavailable database stay unchanged."""
        done, told, unavailable = 0, list[str](), dict[str, str]()
        for sweep in [snapshots.sweep(name) for name in names]:
            if sweep.database not in unavailable:
                try:
                    result = change(sweep)
                except DatabaseUnavailable as error:
                    unavailable[sweep.database] = str(error)
                else:
                    done += 1
                    told += [result] if result.startswith(KEPT) or "Warning" in result else []
                    continue
            told.append(f"{sweep.name} is unchanged: {unavailable[sweep.database]}")
        snapshots.invalidate()
        flash(f"{counted(done, 'worker')} done.")
        for text in told[:_TOLD]:
            flash(text)
        if len(told) > _TOLD:
            flash(f"{len(told) - _TOLD:,} more results are in the action log.")
        return redirect(url_for("front"), 303)

    @app.get("/all/pause")
    def all_to_pause() -> str:
        return page("pause")

    @app.post("/all/pause")
    def pause_all() -> Response | tuple[str, int]:
        form = SentForm("pause")
        until = form.read("until", lambda text: parse_future_time(text, snapshots.current().at))
        if form.errors:
            return page("pause", form), 400
        wanted = Override("", "paused", _reason(form), until, said_by=current_user())
        pause = partial(_switch, snapshots, keep_pause=True)
        return changed(lambda sweep: pause(replace(wanted, worker=sweep.name)), snapshots.sweeps)

    @app.get("/all/resume")
    def all_to_resume() -> str:
        return page("resume")

    @app.post("/all/resume")
    def resume_all() -> Response:
        return changed(_resume, request.form.getlist("name"))


def _reason(form: SentForm) -> str | None:
    return in_one_line(form.typed.get("reason", ""), _LONGEST_REASON) or None


def _time_at(sweep: Sweep) -> Callable[[str], datetime]:
    """Return the parser of a future time, by the clock of the worker's database."""

    def parse(text: str) -> datetime:
        with database.using(sweep.database), translate_postgres_errors():
            return parse_future_time(text, database_now())

    return parse


def _number_to(maximum: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not (text.isascii() and text.isdecimal() and len(text) < 10 and 1 <= int(text) <= maximum):
            raise WrongArgument(f"{in_one_line(text, 20)!r} is not a number from 1 to {maximum:,}")
        return int(text)

    return parse


def _held_lease(snapshots: SnapshotCache, key: str) -> HeldLease:
    lease = next(iter(held_leases(lease_store(snapshots.settings), key)), None)
    return lease or abort(404, "this lease is not held: it was released or has expired")


def _fingerprint(lease: HeldLease) -> str:
    """Return a hash that identifies the holder without revealing its token."""
    return hashlib.sha256(lease.token.encode()).hexdigest()[:16]


_LONGEST_SEARCH: Final = 100  # characters


def _started_at(status: WorkerStatus) -> datetime | None:
    return None if status.last_run is None else status.last_run.started_at


def _oldest(status: WorkerStatus) -> datetime | None:
    # The order of some workers begins with a number, which compares with no time.
    return status.oldest if isinstance(status.oldest, datetime) else None


@dataclass(frozen=True, slots=True)
class Order:
    """Order of the workers. A worker without a value comes last.

    Attributes:
      label: Its name in the list of a form.
      value: Returns the value to sort by.
      largest_first: What a reader looks for first: the latest run, the largest backlog.
    """

    label: str
    value: Callable[[WorkerStatus], Any]
    largest_first: bool = False


#: Value of ``sort`` in the URL -> the order; any other value means the order of trouble.
ORDERS: Final = {
    "name": Order("name", lambda status: status.worker),
    "state": Order("state", lambda status: status.state),
    "last_run": Order("last run, latest first", _started_at, largest_first=True),
    "backlog": Order("backlog, largest first", lambda status: status.waiting and status.waiting.rows, True),
    "oldest": Order("oldest stale row first", _oldest),
    "next_tick": Order("next tick first", lambda status: status.next_tick),
}


@dataclass(frozen=True, slots=True)
class WorkerTable:
    """Rows of the table as the reader has chosen them by the URL, and what is hidden.

    Attributes:
      search: Words that a worker's name or database contains.
      sort: A key of `ORDERS`; empty for the order of trouble.
      workers: The shown ones.
      folded: Those without a problem, which are shown when the reader unfolds them.
      unmatched: The number of those that the search does not find.
    """

    search: str
    sort: str
    workers: Sequence[WorkerStatus]
    folded: Sequence[WorkerStatus]
    unmatched: int

    @property
    def total(self) -> int:
        """The number of workers, hidden or not."""
        return len(self.workers) + len(self.folded) + self.unmatched

    @classmethod
    def of(cls, statuses: Iterable[WorkerStatus], query: Mapping[str, str]) -> WorkerTable:
        """Return the table for the URL's query; workers that are not set up are left out."""
        search, sort = query.get("q", "").strip()[:_LONGEST_SEARCH], query.get("sort", "")
        workers = [status for status in statuses if status.problem is None]
        found = [status for status in workers if _matches(status, search)]
        unmatched = len(workers) - len(found)
        if (order := ORDERS.get(sort)) is None:
            return cls(search, "", *by_trouble(found), unmatched)
        known = [status for status in found if order.value(status) is not None]
        unknown = [status for status in found if order.value(status) is None]
        return cls(
            search, sort, [*sorted(known, key=order.value, reverse=order.largest_first), *unknown], [], unmatched
        )

    def sorted_by(self, sort: str) -> dict[str, str]:
        """Return the URL's query that sorts the same workers by a column."""
        values = {"q": self.search, "sort": sort}
        return {name: value for name, value in values.items() if value}


def _matches(status: WorkerStatus, search: str) -> bool:
    text = f"{status.worker} {status.database}".casefold()
    return all(word in text for word in search.casefold().split())
