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


def send(now: datetime, cron: Cron = EVERY_MINUTE, *, catch_up: bool = True) -> ticks.SentTick | None:
    return ticks.send(WORKER, cron, now, catch_up=catch_up)


def take() -> list[ticks.TakenTick]:
    return ticks.take(HOLDER, [WORKER], 10)


def end_all() -> None:
    """End the due ticks as done."""
    for each in take():
        given = {"worker": WORKER, "tick": each.tick, "message_id": each.message_id, "trigger": "schedule"}
        Run.insert(**given, outcome="done", started_at=NOW, heartbeat_at=NOW, finished_at=NOW).execute()
        ticks.end(HOLDER, each, None, failed=False)


def beat(*, stopped: bool = False) -> None:
    PostgresHeartbeats().write(
        HOLDER, Beat(kind="worker", host="one", pid=1, version="0", up_s=1.0, queues=["q"], stopped=stopped)
    )


def be_silent() -> None:
    """Let the time pass after which a process without heartbeats counts as dead."""
    TickRow.update(due_at=NOW).where(TickRow.holder == HOLDER).execute()


def test_tick_is_sent_once_by_any_number_of_processes(postgres: Database) -> None:
    # S1
    def send_here(_: int) -> ticks.SentTick | None:
        with postgres.connection_context():
            return send(AT)

    with ThreadPoolExecutor(4) as processes:
        sent = [each for each in processes.map(send_here, range(12)) if each is not None]

    assert [(each.tick, each.is_sent) for each in sent] == [(AT.replace(second=0), True)]
    assert len(take()) == 1
    assert ticks.take("process-2", [WORKER], 10) == []


@pytest.mark.parametrize("gap", [3, 4])
def test_tick_sent_after_it_counted_as_missed_counts_no_longer(gap: int) -> None:
    # S1, S5: sent by a process that was suspended, or because the database's clock was set back
    send(AT)
    end_all()
    send(AT + gap * MINUTE)

    late = send(AT + MINUTE)

    assert late is not None and (late.tick, late.is_sent, late.missed) == (AT.replace(second=0) + MINUTE, True, 0)
    assert [row.counts for row in Run.select().where(Run.outcome == "missed")] == [{"missed": gap - 2}]
    assert [send(AT + MINUTE), send(AT + gap * MINUTE)] == [None, None]
    assert [each.tick - late.tick for each in take()] == [(gap - 1) * MINUTE, timedelta()]


@pytest.mark.parametrize("far", [timedelta(hours=6), timedelta(days=3650)])
def test_clock_set_forward_and_back_repeats_no_tick_and_stops_no_schedule(far: timedelta) -> None:
    # S1, S4, S5
    send(AT, HOURLY)
    end_all()
    wrong = send(AT + far, HOURLY)

    assert wrong is not None and wrong.missed == far // timedelta(hours=1) - 1
    assert send(AT, HOURLY) is None
    right = send(AT + timedelta(hours=2), HOURLY)

    assert right is not None and right.is_sent and right.reason is None, "it does not wait for the wrong one"
    assert sum(row.counts["missed"] for row in Run.select().where(Run.outcome == "missed")) == wrong.missed - 1
    assert [send(AT + far, HOURLY), send(AT + timedelta(hours=2, minutes=5), HOURLY)] == [None, None]


@pytest.mark.parametrize(
    ("unsent_since", "reason"),
    [
        (None, "no_scheduler"),
        (AT - timedelta(hours=3), "servers_unavailable"),
        (AT - timedelta(hours=2), "no_scheduler"),
    ],
)
@pytest.mark.parametrize(("catch_up", "missed"), [(True, 3), (False, 4)])
def test_outage_catches_up_the_latest_tick_and_records_the_others(
    catch_up: bool, missed: int, unsent_since: datetime | None, reason: str
) -> None:
    # S4, S5
    send(AT - timedelta(hours=4), HOURLY)
    end_all()

    sent = ticks.send(WORKER, HOURLY, AT + 5 * MINUTE, catch_up=catch_up, unsent_since=unsent_since)

    assert sent is not None and (sent.is_sent, sent.missed) == (catch_up, missed)
    rows = Run.select().where(Run.outcome == "missed")
    assert [(row.counts, row.reason) for row in rows] == [({"missed": missed}, reason)]
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
    be_silent()
    beat()
    assert ticks.take("process-2", [WORKER], 10) == []

    be_silent()

    assert ticks.take("process-2", [WORKER], 10) == [taken]
    ticks.end(HOLDER, taken, None, failed=False)  # the suspended process no longer has it
    assert TickRow.get().holder == "process-2"


def test_tick_whose_taking_was_not_answered_is_taken_again_by_its_process() -> None:
    # S5: its heartbeats keep it from all others
    send(AT)
    [taken] = take()
    beat()

    assert take() == [taken]


def test_process_that_could_send_no_heartbeats_does_not_take_what_it_runs() -> None:
    # as after an outage of the database
    send(AT)
    [taken] = take()
    be_silent()

    assert ticks.take(HOLDER, [WORKER], 10, [taken.message_id]) == []


def test_process_that_stops_returns_its_ticks() -> None:
    send(AT)
    [taken] = take()

    beat(stopped=True)

    assert ticks.take("process-2", [WORKER], 10) == [taken]


@pytest.mark.parametrize("is_recorded", [True, False])
def test_next_tick_does_the_work_of_a_retry_that_waits(is_recorded: bool) -> None:
    # R2, S5
    send(AT)
    [first] = take()
    given = {"worker": WORKER, "tick": first.tick, "message_id": first.message_id, "trigger": "schedule"}
    if is_recorded:
        Run.insert(**given, outcome="failed", started_at=NOW, heartbeat_at=NOW, finished_at=NOW).execute()
    ticks.end(HOLDER, first, timedelta(), failed=True)

    send(AT + MINUTE)

    assert [each.tick - first.tick for each in take()] == [MINUTE]
    assert [(row.tick, row.outcome, row.message_id) for row in Run.select()] == [
        (first.tick, "failed", first.message_id)
    ]


def test_ticks_of_a_worker_that_is_not_set_up_take_no_room() -> None:
    for minute in range(5):
        ticks.remember(WORKER, AT.replace(second=0) + minute * MINUTE)

    assert TickRow.select().count() == 1


@pytest.mark.parametrize(
    ("known", "days", "kept"), [([WORKER], 31, True), (["tests.other"], 29, True), (["tests.other"], 31, False)]
)
def test_waiting_tick_of_a_removed_worker_is_deleted_after_30_days(known: list[str], days: int, kept: bool) -> None:
    send(AT)
    TickRow.update(due_at=NOW - timedelta(days=days)).execute()

    ticks.forget_removed(known)

    assert TickRow.select().exists() == kept


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
