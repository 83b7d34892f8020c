"""Ticks of an installation without Redis, in the database (S1, S4, S5, R2)."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta

import pytest

from tests.internals.core import Cron
from tests.internals.database import Database
from tests.internals.ledger import NOW, PostgresHeartbeats, Run, TickRow, ticks
from tests.internals.ledger import Heartbeat as Beat

WORKER, HOLDER = "tests.expired", "process-1"
EVERY_MINUTE = Cron("* * * * *", UTC)
HOURLY = Cron("0 * * * *", UTC)
AT = datetime(2026, 11, 20, 3, 0, 30, tzinfo=UTC)
MINUTE = timedelta(minutes=1)

pytestmark = pytest.mark.usefixtures("postgres")


def send(now: datetime, cron: Cron = EVERY_MINUTE, *, catch_up: bool = True) -> ticks.Sent | None:
    return ticks.send(WORKER, cron, now, catch_up=catch_up)


def take() -> list[ticks.TakenTick]:
    return ticks.take(HOLDER, [WORKER], 10)


def beat(*, stopped: bool = False) -> None:
    PostgresHeartbeats().write(
        HOLDER, Beat(kind="worker", host="one", pid=1, version="0", up_s=1.0, queues=["q"], stopped=stopped)
    )


def be_silent() -> None:
    """Let the time pass after which a process without heartbeats counts as dead."""
    TickRow.update(due_at=NOW).where(TickRow.holder == HOLDER).execute()


def test_tick_is_sent_once_by_any_number_of_processes(postgres: Database) -> None:
    # S1
    def send_here(_: int) -> ticks.Sent | None:
        with postgres.connection_context():
            return send(AT)

    with ThreadPoolExecutor(4) as processes:
        sent = [each for each in processes.map(send_here, range(12)) if each is not None]

    assert [(each.tick, each.is_sent) for each in sent] == [(AT.replace(second=0), True)]
    assert len(take()) == 1
    assert take() == []


def test_process_that_is_late_does_not_send_a_tick_that_counts_as_missed() -> None:
    # S1, S5
    send(AT)
    send(AT + 2 * MINUTE)

    assert send(AT + MINUTE) is None
    [missed] = Run.select().where(Run.outcome == "missed")
    assert (missed.tick, missed.counts) == (AT.replace(second=0) + MINUTE, {"missed": 1})


def test_clock_set_back_repeats_no_tick_and_set_forward_misses_none_twice() -> None:
    # S1, S4, S5
    send(AT)
    for each in take():
        ticks.end(HOLDER, each, None, failed=False)

    assert [send(AT - 60 * MINUTE), send(AT - 59 * MINUTE), send(AT)] == [None, None, None]
    forward = send(AT + 60 * MINUTE)
    assert [send(AT + MINUTE), send(AT + 60 * MINUTE)] == [None, None]

    assert forward is not None and (forward.is_sent, forward.missed) == (True, 59)
    assert [each.tick - AT.replace(second=0) for each in take()] == [60 * MINUTE]
    assert [row.counts for row in Run.select()] == [{"missed": 59}]


@pytest.mark.parametrize(("catch_up", "missed"), [(True, 3), (False, 4)])
def test_outage_catches_up_the_latest_tick_and_records_the_others(catch_up: bool, missed: int) -> None:
    # S4, S5
    send(AT - timedelta(hours=4), HOURLY)
    for each in take():
        ticks.end(HOLDER, each, None, failed=False)

    sent = send(AT + 5 * MINUTE, HOURLY, catch_up=catch_up)

    assert sent is not None and (sent.is_sent, sent.missed) == (catch_up, missed)
    assert [row.counts for row in Run.select()] == [{"missed": missed}]
    assert send(AT + 6 * MINUTE, HOURLY) is None


def test_memory_of_a_new_worker_begins_with_its_last_tick() -> None:
    # S5: what was before it was not missed
    sent = send(AT + 5 * MINUTE, HOURLY)

    assert sent is not None and (sent.is_sent, sent.missed) == (False, 0)
    assert take() == [] and Run.select().count() == 0


def test_ticks_of_an_earlier_scheduler_are_known_from_the_ledger() -> None:
    # S1: as after a move from Redis
    at = AT.replace(second=0)
    Run.insert(
        worker=WORKER, tick=at, trigger="schedule", outcome="done", started_at=NOW, heartbeat_at=NOW, finished_at=NOW
    ).execute()

    assert send(AT) is None
    assert (sent := send(AT + MINUTE)) is not None and (sent.is_sent, sent.missed) == (True, 0)


def test_tick_of_a_dead_process_is_run_by_another_under_the_same_message() -> None:
    # S5
    send(AT)
    [taken] = take()
    beat()
    assert ticks.take("process-2", [WORKER], 10) == []

    be_silent()

    assert ticks.take("process-2", [WORKER], 10) == [taken]
    ticks.end(HOLDER, taken, None, failed=False)  # the suspended process no longer has it
    assert TickRow.get().holder == "process-2"


def test_process_that_stops_returns_its_ticks() -> None:
    send(AT)
    [taken] = take()

    beat(stopped=True)

    assert ticks.take("process-2", [WORKER], 10) == [taken]


def test_next_tick_does_the_work_of_a_retry_that_waits() -> None:
    # R2
    send(AT)
    [first] = take()
    ticks.end(HOLDER, first, timedelta(), failed=True)

    send(AT + MINUTE)

    assert [each.tick - first.tick for each in take()] == [MINUTE]


def test_tick_is_skipped_while_an_earlier_one_waits_for_its_first_run() -> None:
    # D1, S5
    send(AT)

    sent = send(AT + MINUTE)

    assert sent is not None and sent.reason == "deduplicated"
    [row] = Run.select()
    assert (row.outcome, row.reason, row.tick) == ("skipped", "deduplicated", sent.tick)
    assert [each.tick for each in take()] == [AT.replace(second=0)]


def test_lengths_of_a_queue_are_those_of_its_ticks() -> None:
    queues = {WORKER: "cronjob", "tests.other": "other"}
    send(AT)
    assert [(each.waiting, each.delayed) for each in ticks.queue_lengths(queues).values()] == [(1, 0), (0, 0)]
    assert ticks.queue_lengths(queues)["cronjob"].oldest_at is not None

    [taken] = take()
    running = ticks.queue_lengths(queues)["cronjob"]
    ticks.end(HOLDER, taken, MINUTE, failed=True)
    retried = ticks.queue_lengths(queues)["cronjob"]
    ticks.end(HOLDER, taken, None, failed=False)

    assert (running.waiting, running.oldest_at, retried.waiting, retried.delayed) == (1, None, 0, 1)


def test_ended_tick_does_not_run_again() -> None:
    send(AT)
    [taken] = take()

    ticks.end(HOLDER, taken, None, failed=False)

    assert take() == []
    assert ticks.was_sent(WORKER, taken.tick) and ticks.was_sent(WORKER, taken.tick + MINUTE) is False
    assert ticks.was_sent(WORKER, taken.tick - MINUTE) is None
