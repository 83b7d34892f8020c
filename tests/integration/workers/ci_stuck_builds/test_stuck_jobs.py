"""Document 6, 前後の処理との関連: the parent that enqueues the others, and builds stuck in pending."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from dramatiq.brokers.redis import RedisBroker
from psycopg2.extensions import connection as Connection

from housekeeping import ExclusiveLease, Send, events
from housekeeping.testing.stubs import ManualClock
from housekeeping.workers.ci_stuck_builds.models import Build
from tests.declarations import changed
from tests.faults import at_step, once
from tests.integration.middleware.applications import queued
from tests.integration.middleware.step_worker import StepWorker
from tests.integration.workers.ci_stuck_builds.tables import (
    NOTHING_DROPPED,
    NOW,
    STALE,
    AddBuilds,
    Delayed,
    by_status,
    lines,
)
from tests.internals.core import DeclarationError
from tests.internals.database import connect_to, database
from tests.internals.engine import run_sweep, send
from tests.internals.insight import dry_run, plan
from tests.internals.ledger import Override, Run, switch
from tests.internals.workers import DELAYS, drop_pending, stuck_jobs

DAY_AGO = f"{NOW} - interval '1 day'"
DAY_OLD = f"{DAY_AGO} - interval '1 microsecond'"


def test_the_children_are_enqueued_at_once_and_15_30_and_45_minutes_ahead(
    broker: RedisBroker, delayed: Delayed, clock: ManualClock
) -> None:
    # 実行スケジュール: StuckCiJobsWorkerからのperform_in, 45分後; 入力パラメータ: なし.
    result = run_sweep(stuck_jobs, clock=clock)

    [at_once], messages = queued(broker, "cronjob"), delayed()
    assert (result.outcome, result.counts) == ("done", {"enqueued": 4, "deduplicated": 0})
    assert at_once.actor_name == "ci.stuck_builds.drop_pending"
    assert [
        (message.actor_name, round((message.options["eta"] - message.message_timestamp) / 60_000))
        for message in messages
    ] == [
        ("ci.stuck_builds.drop_running", 15),
        ("ci.stuck_builds.drop_scheduled", 30),
        ("ci.stuck_builds.drop_canceling", 45),
    ]
    assert [(message.args, message.kwargs) for message in (at_once, *messages)] == [((), {})] * 4


def test_a_second_run_within_the_hour_does_not_double_the_children(
    broker: RedisBroker, delayed: Delayed, clock: ManualClock
) -> None:
    run_sweep(stuck_jobs, clock=clock)

    again = run_sweep(stuck_jobs, clock=clock)

    assert (again.outcome, again.counts) == ("done", {"enqueued": 0, "deduplicated": 4})
    assert (len(queued(broker, "cronjob")), len(delayed())) == (1, 3)


def test_parent_needs_neither_lease_nor_table(
    broker: RedisBroker, delayed: Delayed, clock: ManualClock, admin: Connection
) -> None:
    # 排他制御: 親ワーカーとは別のロックを使用
    with admin.cursor() as cursor:
        cursor.execute("DROP TABLE ci_builds")

    with ExclusiveLease("ci/stuck_jobs", timedelta(minutes=30)):
        result = run_sweep(stuck_jobs, clock=clock)

    assert (result.outcome, result.counts["enqueued"]) == ("done", 4)


def test_builds_pending_for_more_than_a_day_are_dropped(
    broker: RedisBroker, add_builds: AddBuilds, clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    add_builds(1, "pending", DAY_OLD, DAY_OLD, first_id=1)
    add_builds(1, "pending", DAY_AGO, DAY_OLD, first_id=2)
    add_builds(1, "pending", DAY_OLD, DAY_AGO, first_id=3)
    add_builds(1, "pending", f"{DAY_AGO} + interval '1 microsecond'", DAY_OLD, first_id=4)
    add_builds(1, "canceling", DAY_OLD, DAY_OLD, first_id=5)

    result = run_sweep(drop_pending, clock=clock)

    assert result.counts == {**NOTHING_DROPPED, "dropped": 1}
    assert by_status() == {"failed": [1], "pending": [2, 3, 4], "canceling": [5]}
    assert Build.get(Build.id == 1).failure_reason == 3
    assert len(lines(caplog, "Cleaning pending, timed-out builds")) == 1
    assert [line["status"] for line in lines(caplog, "Dropping outdated build")] == ["pending"]


def test_missing_actor_is_reported(builds: type[Build], clock: ManualClock) -> None:
    send.forget_all()

    result = run_sweep(stuck_jobs, clock=clock)

    assert isinstance(result.error, DeclarationError)
    assert result.reason == (
        "no actor 'ci.stuck_builds.drop_pending' is registered; call housekeeping.install(broker) first"
    )


PENDING, RUNNING, SCHEDULED, CANCELING = DELAYS

LastRun = Callable[[], Run]
Enqueued = Callable[[], list[str]]


@pytest.fixture
def step_worker(broker: RedisBroker) -> StepWorker:
    return StepWorker(broker, "cronjob")


@contextmanager
def unreachable_database() -> Iterator[None]:
    """PostgreSQL that does not answer."""
    there = database.obj
    database.initialize(connect_to("postgresql://nobody@127.0.0.1:1/nothing"))
    yield
    database.initialize(there)


@pytest.fixture
def first_child_fails() -> Iterator[None]:
    def fail() -> None:
        raise ConnectionError("the broker is away")

    with at_step(send, "actor_named", "before", once(fail)):
        yield


@pytest.fixture
def enqueued(broker: RedisBroker, delayed: Delayed) -> Callable[[], list[str]]:
    """Return the actors of all waiting messages: the ones that are due, then the delayed ones."""
    return lambda: [message.actor_name for message in (*queued(broker, "cronjob"), *delayed())]


def test_unreachable_database_still_enqueues_the_children(
    enqueued: Enqueued, step_worker: StepWorker, clock: ManualClock
) -> None:
    with unreachable_database():
        result = run_sweep(stuck_jobs, clock=clock)

    assert (result.outcome, result.counts["enqueued"]) == ("failed", 4)
    assert str(result.reason).startswith("database: ")
    assert enqueued() == [*DELAYS]


@pytest.mark.parametrize("state", ["paused", "disabled"])
def test_paused_or_disabled_parent_enqueues_no_child_unless_forced(
    enqueued: Enqueued, clock: ManualClock, state: str
) -> None:
    parent = changed(stuck_jobs, enabled=state != "disabled")
    if state == "paused":
        switch(Override(stuck_jobs.name, "paused"))

    result = run_sweep(parent, clock=clock)
    waiting = len(enqueued())
    forced = run_sweep(parent, clock=clock, force=True)

    assert (result.outcome, result.reason, result.counts.get("enqueued", 0), waiting) == ("skipped", state, 0, 0)
    assert (forced.outcome, forced.counts["enqueued"], len(enqueued())) == ("done", 4, 4)


def test_plan_shows_the_children_and_enqueues_none(enqueued: Enqueued, clock: ManualClock) -> None:
    planned, dry = plan(stuck_jobs, clock=clock).as_json(), dry_run(stuck_jobs, clock=clock)

    assert [(each["stage"], each["samples"]) for each in planned["stages"]] == [
        (
            "messages",
            [
                {"actor": PENDING, "delay_s": 0.0},
                {"actor": RUNNING, "delay_s": 900.0},
                {"actor": SCHEDULED, "delay_s": 1800.0},
                {"actor": CANCELING, "delay_s": 2700.0},
            ],
        )
    ]
    assert (dry.counts, enqueued()) == ({"enqueued": 4, "deduplicated": 0}, [])


def test_child_that_cannot_be_enqueued_fails_the_run_after_the_others(
    enqueued: Enqueued,
    clock: ManualClock,
    last_run: LastRun,
    first_child_fails: None,
    reported: list[dict[str, Any]],
) -> None:
    result = run_sweep(stuck_jobs, clock=clock)

    counts = {"enqueued": 3, "deduplicated": 0}
    assert (result.outcome, result.reason, result.counts) == ("failed", "the broker is away", counts)
    assert (last_run().outcome, last_run().counts) == ("failed", counts)
    assert enqueued() == [RUNNING, SCHEDULED, CANCELING]
    assert [type(report["error"]) for report in reported] == [ConnectionError]
    with pytest.raises(ConnectionError):
        result.raise_for_failure()


def test_parent_stopped_by_a_shutdown_does_not_duplicate_its_children(enqueued: Enqueued, clock: ManualClock) -> None:
    stopping = threading.Event()
    stopping.set()

    stopped = run_sweep(stuck_jobs, clock=clock, stopping=stopping)
    again = run_sweep(stuck_jobs, clock=clock)

    assert (stopped.counts["enqueued"], again.counts["enqueued"], len(enqueued())) == (4, 0, 4)


def run_children(step_worker: StepWorker) -> list[tuple[str, str | None]]:
    """Make delayed messages due and process all; return trigger and outcome of the children's runs."""
    step_worker.come_due()
    while (message := step_worker.fetch()) is not None:
        step_worker.run(message)
    return [(row.trigger, row.outcome) for row in Run.select().where(Run.worker.in_(list(DELAYS)))]


def test_children_run_in_the_hour_after_a_manual_run_of_the_parent(delayed: Delayed, step_worker: StepWorker) -> None:
    clock = ManualClock(datetime(2026, 3, 2, 10, 0, tzinfo=UTC))
    run_sweep(stuck_jobs, clock=clock)
    first = run_children(step_worker)
    clock.advance(timedelta(minutes=50))
    manual = run_sweep(stuck_jobs, clock=clock)
    clock.advance(timedelta(minutes=10))
    hourly = run_sweep(stuck_jobs, clock=clock)

    both = run_children(step_worker)

    assert (manual.counts["enqueued"], hourly.counts["enqueued"]) == (4, 0)
    assert (first, both) == ([("parent", "done")] * 4, [("parent", "done")] * 8)


def test_child_that_waits_for_its_retry_is_not_duplicated(
    delayed: Delayed, step_worker: StepWorker, clock: ManualClock, admin: Connection
) -> None:
    run_sweep(stuck_jobs, clock=clock)
    with admin.cursor() as cursor:
        cursor.execute("ALTER TABLE ci_builds RENAME TO elsewhere")
        failed = run_children(step_worker)
        cursor.execute("ALTER TABLE elsewhere RENAME TO ci_builds")

    again = run_sweep(stuck_jobs, clock=clock)

    assert failed == [("parent", "failed")] * 4
    assert (again.counts["enqueued"], len(delayed())) == (0, 4)
    assert sorted(str(outcome) for _, outcome in run_children(step_worker)) == ["done"] * 4 + ["failed"] * 4


def test_child_waits_at_most_10_minutes_for_a_retry(
    delayed: Delayed, step_worker: StepWorker, clock: ManualClock
) -> None:
    # Otherwise the children of the hours after a long outage would be duplicates of one that waits for days.
    run_sweep(stuck_jobs, clock=clock)
    database.close()
    step_worker.come_due()
    for message in iter(step_worker.fetch, None):
        message.options["retries"] = 24
        with unreachable_database():
            step_worker.run(message)

    waits = [message.options["eta"] - time.time() * 1000 for message in delayed()]
    assert len(waits) == 4
    assert max(waits) <= 600_000


def test_child_that_runs_when_its_parent_comes_again_runs_once_more(
    enqueued: Enqueued, step_worker: StepWorker, clock: ManualClock, add_builds: AddBuilds
) -> None:
    add_builds(1, "canceling", STALE, STALE)

    def parent_comes_again(sender: str, **told: Any) -> None:
        for _ in range(2):
            Send(DELAYS).send()

    run_sweep(stuck_jobs, clock=clock)
    step_worker.come_due()
    with events.build_dropped.connected_to(parent_comes_again):
        for message in iter(step_worker.fetch, None):
            step_worker.run(message)

    runs = [row.outcome for row in Run.select().where(Run.worker == CANCELING)]
    assert runs == ["done", "done"]
    assert CANCELING not in enqueued()
