"""An operator stops one running run: it ends after its batch, and its message is done."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from housekeeping import Sweep, events
from housekeeping.testing.stubs import ManualClock
from tests.declarations import changed
from tests.integration.archives.tickets import create, create_archives, fill
from tests.integration.archives.tickets import sweep as tickets
from tests.integration.conftest import AddStatuses
from tests.integration.sweeps.engine.sizing import DUE, LONG_DUE, SMALL, Impatient
from tests.integration.sweeps.engine.test_narrowing import Outside, said
from tests.internals.core import MessageContext, current_message
from tests.internals.database import Database
from tests.internals.engine import PurgeRequest, restoration_of, run_sweep, sweep_of
from tests.internals.ledger import NOW, Override, Run, history, operators, resume, runs, switch

ANNA = "anna@ops"


def stop(user: str = ANNA) -> tuple[bool, str]:
    """Stop the run that is at work."""
    record = history.find(Run.get(Run.outcome.is_null()).id)
    assert record is not None
    return history.stop(record, user)


@contextmanager
def message(message_id: str = "message-1", stopping: threading.Event | None = None) -> Iterator[None]:
    token = current_message.set(MessageContext(message_id, stopping=stopping or threading.Event()))
    try:
        yield
    finally:
        current_message.reset(token)


#: What an operator does, and why the run then ended.
ENDINGS = pytest.mark.parametrize(
    ("end", "reason"),
    [(lambda worker: stop(), "stopped"), (lambda worker: switch(Override(worker, "paused")), "paused")],
    ids=["stop", "pause"],
)


@ENDINGS
def test_stopped_run_ends_after_its_batch_and_the_next_resumes(
    add_statuses: AddStatuses, last_run: Callable[[], Run], end: Callable[[str], object], reason: str
) -> None:
    add_statuses(50, DUE)

    stopped = run_sweep(SMALL, on_batch=said(after=10, say=lambda: end(SMALL.name)))
    row = last_run()
    add_statuses(1, LONG_DUE, first_id=1000)
    resume(SMALL.name)
    next_one = run_sweep(SMALL)

    assert (stopped.outcome, stopped.reason, stopped.counts["deleted_rows"]) == ("partial", reason, 20)
    assert (row.outcome, row.reason, row.counts["deleted_rows"]) == ("partial", reason, 20)
    assert (row.stopped_by, row.counts["out_of_time"]) == (ANNA if reason == "stopped" else None, False)
    # Where it stopped, then the row that became stale before that place.
    assert (next_one.outcome, next_one.counts["deleted_rows"]) == ("done", 31)


def test_forced_run_is_stopped_as_well(add_statuses: AddStatuses) -> None:
    add_statuses(50, DUE)
    switch(Override(SMALL.name, "paused"))

    result = run_sweep(SMALL, force=True, on_batch=said(after=10, say=stop))

    assert (result.reason, result.counts["deleted_rows"]) == ("stopped", 20)


@ENDINGS
def test_message_of_a_stopped_run_is_done(add_statuses: AddStatuses, end: Callable[[str], object], reason: str) -> None:
    add_statuses(30, DUE)

    with message():
        result = run_sweep(SMALL, on_batch=said(after=10, say=lambda: end(SMALL.name)))
        result.raise_for_failure()
        again = run_sweep(SMALL, force=True)

    assert (result.reason, again.outcome, again.reason) == (reason, "skipped", "already_done")


def test_message_of_a_run_that_died_after_it_was_stopped_is_done(add_statuses: AddStatuses) -> None:
    add_statuses(30, DUE)
    moments = {"started_at": NOW, "heartbeat_at": NOW}
    Run.create(worker=SMALL.name, trigger="schedule", message_id="message-1", counts={"deleted_rows": 3}, **moments)
    stop()

    with message():
        again = run_sweep(SMALL)

    assert (again.outcome, again.reason) == ("skipped", "already_done")


def test_message_of_a_run_that_was_stopped_during_a_shutdown_is_done(add_statuses: AddStatuses) -> None:
    add_statuses(30, DUE)
    stopping = threading.Event()

    def say() -> None:
        stop()
        stopping.set()

    with message(stopping=stopping), subscribed(events.user_status_cleared):
        first = run_sweep(SMALL, on_batch=said(after=10, say=say))
        stopping.clear()
        again = run_sweep(SMALL)

    assert first.outcome == "partial" and (again.outcome, again.reason) == ("skipped", "already_done")


def test_run_whose_batches_need_a_transaction_is_stopped(add_statuses: AddStatuses) -> None:
    add_statuses(50, DUE)

    with subscribed(events.user_status_cleared):
        result = run_sweep(SMALL, on_batch=said(after=10, say=stop))

    assert (result.outcome, result.reason, result.counts["deleted_rows"]) == ("partial", "stopped", 20)


@contextmanager
def subscribed(event: Any) -> Iterator[None]:
    def handle(connection: Any, rows: Any, **about: Any) -> None:
        """Nothing."""

    events.on(event, handle, within_transaction=True)
    try:
        yield
    finally:
        events.off(event, handle)


@ENDINGS
def test_long_page_of_outside_effects_ends_at_a_heartbeat(
    postgres: Database, monkeypatch: pytest.MonkeyPatch, end: Callable[[str], object], reason: str
) -> None:
    monkeypatch.setattr(runs, "HEARTBEAT", runs.HEARTBEAT * 0)
    page = Outside(between=lambda number: end("outside") and None if number == 3 else None)

    result = run_sweep(Sweep("outside", lambda sweep: [page]))

    assert (result.outcome, result.reason, page.effects) == ("partial", reason, [0, 1, 2, 3])


@ENDINGS
def test_wait_ends_within_a_second(
    add_statuses: AddStatuses, clock: ManualClock, end: Callable[[str], object], reason: str
) -> None:
    add_statuses(100, DUE)

    class Ending(Impatient):
        def wait(self, timeout: float | None = None) -> bool:
            end(SMALL.name)
            return super().wait(timeout)

    stopping = Ending(clock)

    result = run_sweep(changed(SMALL, rows_per_s=0.1), clock=clock, stopping=stopping)

    assert (result.outcome, result.reason, result.counts["deleted_rows"]) == ("partial", reason, 1)
    assert stopping.waits == [1.0]


def test_purge_is_stopped(postgres: Database) -> None:
    postgres.execute_sql(
        "CREATE TABLE sessions (id int PRIMARY KEY); INSERT INTO sessions SELECT generate_series(1, 9)"
    )
    sweep = sweep_of(PurgeRequest(table="sessions", where="true", batch_size=2))

    result = run_sweep(changed(sweep, batch_takes=None), confirmed=True, on_batch=said(after=2, say=stop))

    assert (result.outcome, result.reason, result.counts["deleted_rows"]) == ("partial", "stopped", 4)


def test_restore_is_stopped_and_continued_by_the_same_command(postgres: Database) -> None:
    create()
    fill(stale=9)
    create_archives(tickets())
    run_id = run_sweep(tickets()).run_id
    assert run_id is not None
    told: list[Any] = []

    def on_batch(counts: Any) -> None:
        told.append(told or stop())

    first = restoration_of(tickets(), run_id).carry_out(pause=True, on_batch=on_batch)
    second = restoration_of(tickets(), run_id).carry_out(pause=True)

    assert (first.outcome, first.reason, first.counts["restored"]) == ("partial", "stopped", 4)
    assert (second.outcome, second.counts["restored"]) == ("done", 7)


def test_stop_of_a_run_that_ends_meanwhile_says_so(add_statuses: AddStatuses) -> None:
    found: list[Any] = []
    add_statuses(5, DUE)
    run_sweep(SMALL, on_begin=lambda run_id: found.append(history.find(run_id)))

    assert history.stop(found[0], ANNA)[1].endswith("has already ended as done; nothing was stopped")


def test_last_batch_wins_over_a_stop(add_statuses: AddStatuses) -> None:
    add_statuses(15, DUE)

    result = run_sweep(SMALL, on_batch=said(after=10, say=stop))

    assert (result.outcome, result.counts["deleted_rows"]) == ("done", 15)


def test_paused_worker_stays_paused_when_its_run_is_stopped(add_statuses: AddStatuses) -> None:
    add_statuses(50, DUE)

    def say() -> None:
        stop()
        switch(Override(SMALL.name, "paused"))

    run_sweep(SMALL, on_batch=said(after=10, say=say))

    override = operators.override_of(SMALL.name)
    assert override is not None and override.state == "paused"
    assert run_sweep(SMALL).reason == "paused"


@pytest.mark.parametrize("user", ["x" * 1000, "anna\n\x00<script>"])
def test_long_or_hostile_user_is_stored_in_one_line(add_statuses: AddStatuses, user: str) -> None:
    add_statuses(50, DUE)

    run_sweep(SMALL, on_batch=said(after=10, say=lambda: stop(user)))

    stored = Run.get().stopped_by or ""
    assert 0 < len(stored) <= 200 and "\n" not in stored
