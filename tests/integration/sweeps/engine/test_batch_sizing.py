"""Batches that grow and shrink by the time that they take."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import psycopg2
import pytest
from peewee import OperationalError

from housekeeping import Call, Delete, Event, Guard, Limits, Rows, Settings, Sweep, events
from housekeeping.testing.stubs import ManualClock
from housekeeping.workers.user_status_cleanup.models import UserStatus
from tests.declarations import changed
from tests.integration.conftest import AddStatuses
from tests.integration.statements import watch_statements
from tests.integration.sweeps.engine.sizing import DUE, SMALL, WELL, Impatient, Sizes, Told, run_told
from tests.internals.core import SettingsError, WorkerSettings
from tests.internals.engine import DbHealth, run_sweep
from tests.internals.insight import plan
from tests.internals.ledger import Counts, Override, switch
from tests.internals.workers import BUILT_IN
from tests.internals.workers import uploads_sweep as uploads

TARGET = changed(SMALL, batch=100, batch_takes=timedelta(seconds=1), runtime=timedelta(hours=1))
CLEARED = events.event("shop.status_cleared")
ROWS = Rows(UserStatus, stale=lambda row, now: row.clear_status_at <= now, order="clear_status_at", action=Delete())
OWN = Sweep("shop.statuses", ROWS, guard=Guard(first_run=False))
ASKS = "pg_blocking_pids"


class Slow(Sizes):
    """Lets time pass in each batch, in order; the last length from then on."""

    def __init__(self, clock: ManualClock, *seconds: float) -> None:
        super().__init__()
        self._clock = clock
        self._seconds = list(seconds)

    def __call__(self, counts: Counts) -> None:
        super().__call__(counts)
        seconds = self._seconds.pop(0) if len(self._seconds) > 1 else self._seconds[0]
        self._clock.advance(timedelta(seconds=seconds))


def test_slow_batches_shrink_step_by_step_to_a_tenth(add_statuses: AddStatuses, clock: ManualClock) -> None:
    add_statuses(250, DUE)
    slow = Slow(clock, 1.001)

    run_sweep(TARGET, clock=clock, on_batch=slow)

    assert slow.seen[:7] == [100, 50, 20, 10, 10, 10, 10]


def test_quick_batches_grow_step_by_step_to_twenty_times(add_statuses: AddStatuses, clock: ManualClock) -> None:
    add_statuses(6000, DUE)
    slow = Slow(clock, 0)

    run_sweep(TARGET, clock=clock, on_batch=slow)

    assert slow.seen == [100, 200, 500, 1000, 2000, 2000, 200]


@pytest.mark.parametrize(
    ("seconds", "sizes"),
    [
        pytest.param(0.5, [100, 200], id="the next step would be in time"),
        pytest.param(0.501, [100, 100], id="the next step would be late"),
        pytest.param(1.0, [100, 100], id="just in time"),
        pytest.param(1.001, [100, 50], id="late"),
    ],
)
def test_batch_grows_and_shrinks_by_the_time_that_it_took(
    add_statuses: AddStatuses, clock: ManualClock, seconds: float, sizes: list[int]
) -> None:
    add_statuses(400, DUE)
    slow = Slow(clock, seconds)

    run_sweep(TARGET, clock=clock, on_batch=slow)

    assert slow.seen[:2] == sizes


def test_batch_that_was_slow_once_grows_again(add_statuses: AddStatuses, clock: ManualClock) -> None:
    add_statuses(1000, DUE)
    slow = Slow(clock, 2, 2, 2, 0)

    run_sweep(TARGET, clock=clock, on_batch=slow)

    assert slow.seen[:7] == [100, 50, 20, 10, 20, 50, 100]


def test_small_batch_shrinks_to_one_row(add_statuses: AddStatuses, clock: ManualClock) -> None:
    add_statuses(17, DUE)
    slow = Slow(clock, 2, 2, 2, 0)

    run_sweep(changed(TARGET, batch=5), clock=clock, on_batch=slow)

    assert slow.seen == [5, 2, 1, 1, 2, 5, 1]


def test_no_batch_is_larger_than_the_largest(add_statuses: AddStatuses, clock: ManualClock) -> None:
    add_statuses(25_000, DUE)
    slow = Slow(clock, 0)

    run_sweep(changed(TARGET, batch=4000), clock=clock, on_batch=slow)

    assert slow.seen == [4000, 8000, 10_000, 3000]


def test_narrowed_batch_size_limits_batches_and_lets_none_grow(add_statuses: AddStatuses, clock: ManualClock) -> None:
    add_statuses(150, DUE)
    switch(Override(SMALL.name, "narrow", batch_size=30))
    slow = Slow(clock, 2, 2, 0)

    run_sweep(TARGET, clock=clock, on_batch=slow)

    assert slow.seen == [30, 30, 20, 30, 30, 10]


def test_throttle_shrinks_a_batch_and_lets_it_not_grow(add_statuses: AddStatuses, clock: ManualClock) -> None:
    add_statuses(1000, DUE)
    slow = Slow(clock, 2, 2, 0)  # the second batch begins when the next look is due
    lagging = Told(WELL, DbHealth(99.0, 0, False))
    in_time = changed(TARGET, batch_takes=timedelta(seconds=3))

    run_told(in_time, clock=clock, on_batch=slow, health=lagging, stopping=Impatient(clock))

    assert slow.seen[:6] == [100, 100, 50, 20, 10, 10]


def test_rows_per_second_and_the_most_rows_limit_batches(add_statuses: AddStatuses, clock: ManualClock) -> None:
    add_statuses(1000, DUE)
    slow = Slow(clock, 0)

    run_sweep(changed(TARGET, rows_per_s=150), clock=clock, on_batch=slow, stopping=Impatient(clock), max_rows=500)

    assert slow.seen == [100, 150, 150, 100]


def test_sweep_of_ones_own_grows_by_default(add_statuses: AddStatuses, clock: ManualClock) -> None:
    add_statuses(900, DUE)
    sizes = Sizes()

    run_sweep(OWN, clock=clock, on_batch=sizes)

    assert sizes.seen == [100, 200, 500, 100]


def test_each_size_is_compiled_once(
    add_statuses: AddStatuses, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_statuses(300, DUE)
    prepared: list[str] = []
    watch_statements(monkeypatch, lambda sql: prepared.append(sql) if "PREPARE" in sql else None)

    run_sweep(changed(OWN, batch=10), clock=clock, on_batch=Slow(clock, *[0.3, 0] * 20))

    limits = [sql.partition("LIMIT ")[2].partition(" ")[0] for sql in prepared]
    assert len(limits) == len(set(limits)), "a size that returns is executed, not prepared again"


@pytest.mark.parametrize("sweep", [each for family in BUILT_IN for each in family.SWEEPS], ids=lambda sweep: sweep.name)
def test_built_in_workers_keep_the_sizes_of_their_documents(sweep: Sweep) -> None:
    sizes_are_free = sweep.name in ("housekeeping.old_runs", "housekeeping.outbox", "ci.stuck_jobs")

    assert (sweep.limits.batch_takes is None) is not sizes_are_free


def test_calls_are_as_many_as_declared(add_statuses: AddStatuses, clock: ManualClock) -> None:
    add_statuses(250, DUE)
    given: list[int] = []
    call = Call(lambda rows: given.append(len(rows)), then=Delete(), whole_batch=True)

    run_sweep(changed(OWN, action=call), clock=clock, on_batch=Slow(clock, 0, 10))

    assert given == [100, 100, 50]


def test_handlers_in_the_transaction_never_get_more_rows_than_declared(
    add_statuses: AddStatuses, clock: ManualClock
) -> None:
    add_statuses(400, DUE)
    given: list[int] = []

    def handler(connection: Any, rows: list[dict[str, Any]], **run: Any) -> None:
        given.append(len(rows))

    events.on(CLEARED, handler, within_transaction=True)
    try:
        run_sweep(changed(OWN, event=Event(CLEARED, "user_id")), clock=clock, on_batch=Slow(clock, 0, 1, 0))
    finally:
        events.off(CLEARED, handler)

    assert given == [100, 100, 50, 100, 50]


class Waiting:
    """Session that waits for a row that the batch has locked, from right before the run looks for such sessions.

    Parameters:
      looks: At which of its looks it finds one.
    """

    def __init__(self, url: str, *looks: int) -> None:
        self._url = url
        self._looks = looks
        self._threads: list[threading.Thread] = []
        self.seen = 0

    def __call__(self, sql: str) -> None:
        if ASKS not in sql:
            return
        self.seen += 1
        if self.seen not in self._looks:
            return
        connection = psycopg2.connect(self._url)
        pid = connection.get_backend_pid()
        self._threads.append(threading.Thread(target=self._lock, args=(connection,)))
        self._threads[-1].start()
        deadline = time.monotonic() + 20
        with psycopg2.connect(self._url) as other, other.cursor() as cursor:
            while not cursor.rowcount > 0:
                assert time.monotonic() < deadline
                cursor.execute("SELECT FROM pg_locks WHERE NOT granted AND pid = %s", (pid,))
        other.close()

    def join(self) -> None:
        for each in self._threads:
            each.join(20)

    def _lock(self, connection: Any) -> None:
        with connection.cursor() as cursor:
            cursor.execute("SELECT FROM user_statuses ORDER BY clear_status_at LIMIT 1 FOR UPDATE")
        connection.rollback()
        connection.close()


@pytest.fixture
def own_url(settings: Settings) -> str:
    return f"{settings.database_url}&options=-csearch_path%3D{settings.namespace}"


@pytest.mark.direct_only(reason="it waits for the lock of a session that it names")
def test_batch_whose_locks_others_wait_for_shrinks(
    add_statuses: AddStatuses, clock: ManualClock, monkeypatch: pytest.MonkeyPatch, waiting: Callable[..., Waiting]
) -> None:
    add_statuses(3000, DUE)
    other = waiting(1, 2)
    watch_statements(monkeypatch, other)
    slow = Slow(clock, 1)

    def committed(counts: Counts) -> None:
        other.join()  # a session that still has its row would make the next batch skip this row
        slow(counts)

    run_sweep(changed(TARGET, batch_takes=timedelta(seconds=10)), clock=clock, on_batch=committed)

    # A batch takes a second, so every other one looks. The first two looks find a session that waits.
    assert slow.seen[:10] == [100, 200, 500, 200, 200, 100, 100, 200, 200, 500]


@pytest.fixture
def waiting(own_url: str) -> Any:
    made: list[Waiting] = []

    def make(*looks: int) -> Waiting:
        made.append(Waiting(own_url, *looks))
        return made[-1]

    yield make
    for each in made:
        each.join()


def test_run_looks_for_waiting_sessions_every_two_seconds_at_most(
    add_statuses: AddStatuses, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_statuses(1000, DUE)
    statements: list[str] = []
    watch_statements(monkeypatch, statements.append)
    fixed = changed(OWN, batch=50, batch_takes=timedelta(seconds=0.6))

    run_sweep(fixed, clock=clock, on_batch=Slow(clock, 0.5))

    # 20 batches in 10 seconds, and one that finds nothing.
    assert len([each for each in statements if ASKS in each]) == 5


def test_workers_with_fixed_batches_do_not_look_for_waiting_sessions(
    add_statuses: AddStatuses, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_statuses(100, DUE)
    statements: list[str] = []
    watch_statements(monkeypatch, statements.append)

    run_sweep(SMALL, clock=clock, on_batch=Slow(clock, 1))

    assert [each for each in statements if ASKS in each] == []


def test_run_continues_if_it_cannot_look_for_waiting_sessions(
    add_statuses: AddStatuses,
    clock: ManualClock,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    add_statuses(1000, DUE)

    def refuse(sql: str) -> None:
        if ASKS in sql:
            raise OperationalError("permission denied for view pg_locks")

    watch_statements(monkeypatch, refuse)

    result = run_sweep(TARGET, clock=clock, on_batch=Slow(clock, 0.9))

    assert (result.outcome, result.counts["deleted_rows"]) == ("done", 1000)
    assert [each.message for each in caplog.records].count("Whether sessions wait for the run's locks is unknown") == 1


def test_plan_says_which_sizes_a_run_would_use(add_statuses: AddStatuses) -> None:
    add_statuses(6000, DUE)

    ((_, batching),) = plan(OWN).stages

    assert (batching.rows, batching.most_rows, str(batching)) == (100, 2000, "7 to 60")


def test_plan_of_fixed_batches_has_one_size(add_statuses: AddStatuses) -> None:
    add_statuses(21, DUE)

    ((_, batching),) = plan(SMALL).stages

    assert (batching.rows, batching.most_rows, str(batching)) == (10, 10, "3")


def test_worker_with_fixed_batches_rejects_a_target() -> None:
    with pytest.raises(SettingsError, match=r'"target_batch_s"\] is 1.0, but this worker has no use for it'):
        uploads.configured(WorkerSettings(target_batch_s=1.0))


def test_target_batch_time_is_set_by_a_setting() -> None:
    assert SMALL.configured(WorkerSettings(target_batch_s=0.5)).limits.batch_takes == timedelta(seconds=0.5)
    assert OWN.configured(WorkerSettings(target_batch_s=None)).limits.batch_takes is None


def test_batches_take_a_fifth_of_a_second_by_default() -> None:
    assert (Limits().batch, Limits().batch_takes) == (100, timedelta(milliseconds=200))
