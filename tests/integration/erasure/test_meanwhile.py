"""Erasures beside a sweep that deletes rows of the same subject, and erasures that take several runs."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from typing import Any, Final

import pytest
from psycopg2.extensions import connection as Connection

from housekeeping import Delete, Guard, Rows, Settings, Sweep
from housekeeping.testing.stubs import ManualClock
from tests.integration.erasure.shop import ERASED, MARKER_ID, PERSON, ask, deciding, erase, row, rows, with_key
from tests.integration.pausing import acting_in_the_gap
from tests.internals.core import MessageContext, current_message
from tests.internals.database import database
from tests.internals.engine import run_sweep
from tests.internals.erasures import execute, merged, work
from tests.internals.ledger import Run

pytestmark = pytest.mark.usefixtures("customers")

THREE_MINUTES: Final = timedelta(minutes=3)

#: Rows of the subject in the tables from which the erasure and the sweep delete.
OWN: Final = {"account": 1, "session": 5, "orders": 4, "item": 8, "comment": 2}
SUBJECT: Final = deciding(orders=Delete(), comment=Delete(), comment__author_id=None, comment__parent_id=None)
SWEEP: Final = Sweep(
    "shop.accounts",
    Rows(
        "account",
        stale=lambda row: row.id == MARKER_ID,
        action=Delete(dependents={"orders": "delete", "comment": "delete"}),
    ),
    guard=Guard(first_run=False),
)
LEFT: Final = {
    **ERASED,
    "orders": [(5, 1, "o", "o"), (6, 1, "o", "o")],
    "comment": [(2, 1, "a reply"), (4, 1, "alone")],
}


@pytest.fixture(params=["account", "session", "orders", "item", "comment"])
def pause(request: pytest.FixtureRequest, customers: None, plant: Any) -> Callable[[], None]:
    """Return a function that makes this thread's deletions pause, each time at another table's first row."""
    database.execute_sql("ALTER TABLE comment DROP COLUMN parent_id")
    first = MARKER_ID if request.param == "account" else 1
    where = f"OLD.id = {first} AND current_setting('test.pauses', true) = 'on'"
    plant(f"DELETE ON {request.param}", where, "PERFORM pause_at(1, 1)")
    return lambda: database.execute_sql("SET test.pauses = 'on'")


def _in_thread(function: Callable[[], Any]) -> Any:
    try:
        return function()
    finally:
        database.close()


def _is_right(done: Any, swept: Any) -> None:
    """Check that nothing is left, and that each row is in the numbers of the one that deleted it."""
    assert (done.state, done.error, swept.outcome, swept.counts["failed"]) == ("done", None, "done", 0)
    assert rows() == LEFT
    of_sweep = merged(swept.counts["details"]["dependents"], {"account": {"deleted": swept.counts["deleted_rows"]}})
    both = merged({name: done.counts.get(name, {}) for name in OWN}, of_sweep)
    assert {name: each["deleted"] for name, each in both.items()} == OWN
    assert not any(done.proof["left"].values())


def test_erasure_finds_what_a_sweep_was_deleting_gone_in_its_next_pass(
    settings: Settings, admin: Connection, pause: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    left, has_passed, has_swept = work.Erasing.left, threading.Event(), threading.Event()
    erasing: list[Future[Any]] = []

    def look(self: Any) -> Any:
        found = left(self)
        has_passed.set()
        assert has_swept.wait(15)
        return found

    def begin() -> None:
        erasing.append(pool.submit(_in_thread, lambda: erase(settings, SUBJECT)))
        assert has_passed.wait(15)

    monkeypatch.setattr(work.Erasing, "left", look)
    with ThreadPoolExecutor(1) as pool:
        try:
            with acting_in_the_gap(admin, begin):
                pause()
                swept = run_sweep(SWEEP)
        finally:
            has_swept.set()
        done = erasing[0].result(15)

    _is_right(done, swept)
    assert done.proof["passes"] == 2


def test_sweep_leaves_what_an_erasure_is_deleting(
    settings: Settings, admin: Connection, pause: Callable[[], None]
) -> None:
    swept: list[Any] = []

    with acting_in_the_gap(admin, lambda: swept.append(_in_thread(lambda: run_sweep(SWEEP)))):
        pause()
        done = erase(settings, SUBJECT)

    _is_right(done, swept[0])


def test_run_that_reaches_its_limit_is_continued_by_the_next_run(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each batch that changes rows takes three of the five minutes of a run."""
    clock, runs, changed = ManualClock(), list[Any](), [0]

    def tick(counts: Any) -> None:
        now_changed = sum(counts[name] for name in ("deleted_rows", "deleted_dependents", "anonymised_rows"))
        clock.advance(THREE_MINUTES * (now_changed != changed[0]))
        changed[0] = now_changed

    def run(*arguments: Any, **options: Any) -> Any:
        changed[0] = 0
        runs.append(run_sweep(*arguments, **options, clock=clock, on_batch=tick))
        return runs[-1]

    monkeypatch.setattr(work, "run_sweep", run)
    monkeypatch.setattr(work, "_BATCH", 2)
    number, token = ask(settings), current_message.set(MessageContext("one-message"))

    execute(number, with_key(settings), {"person": PERSON})
    current_message.reset(token)

    done = row(number)
    assert {(each.outcome, each.reason) for each in runs[:-1]} == {("partial", "out_of_time")}
    assert (len(runs) > 4, runs[-1].outcome) == (True, "done")
    assert (done.state, done.proof["passes"], rows()) == ("done", 1, ERASED)
    assert done.counts["item"] == {"deleted": 8} and done.counts["orders"] == {"anonymised": 4}
    assert [each.outcome for each in Run.select().order_by(Run.id)] == [each.outcome for each in runs]


def test_runs_that_change_nothing_within_their_time_end_as_incomplete(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = ManualClock()
    ending = partial(run_sweep, clock=clock, on_batch=lambda _: clock.advance(2 * THREE_MINUTES))
    monkeypatch.setattr(work, "run_sweep", ending)

    left = erase(settings)

    assert (left.state, left.proof["passes"], left.proof["left"]["account"]) == ("incomplete", work.PASSES, 1)
    assert left.error.endswith("left: a run reached its time limit and changed nothing")
