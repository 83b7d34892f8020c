"""The parent enqueues each child that is not live, whatever the outcome of its own run."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from dramatiq.brokers.redis import RedisBroker
from psycopg2.extensions import connection as Connection

from housekeeping.core import events
from housekeeping.database.connection import connect_to, database
from housekeeping.leases.lease import ExclusiveLease
from housekeeping.sweeps.engine.runner import run_sweep
from housekeeping.sweeps.insight.plan import plan
from housekeeping.sweeps.ledger.models import Run
from housekeeping.sweeps.ledger.overrides import Override, switch
from housekeeping.sweeps.limits.breaker import Breaker
from housekeeping.sweeps.limits.db_health import DbHealth
from housekeeping.sweeps.limits.throttle import ThrottleLimits
from housekeeping.testing import ManualClock
from housekeeping.workers.ci_stuck_builds import fan_out
from housekeeping.workers.ci_stuck_builds.worker import DELAYS, drop_canceling, stuck_jobs
from tests.faults import at_step, once
from tests.integration.middleware.step_worker import StepWorker
from tests.integration.sweeps.engine.sizing import Impatient, Told
from tests.integration.workers.ci_stuck_builds.tables import NOW, STALE, AddBuilds, Delayed, by_status

#: Stops a run that finds a single stale row.
STRICT = dataclasses.replace(stuck_jobs, breaker=Breaker(share=1e-9, action="stop"))
DAY_OLD = f"{NOW} - interval '1 day 1 second'"
RUNNING, SCHEDULED, CANCELING = DELAYS

LastRun = Callable[[], Run]


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

    with at_step(fan_out, "actor_named", "before", once(fail)):
        yield


def names(delayed: Delayed) -> list[str]:
    return [message.actor_name for message in delayed()]


def test_held_lease_still_enqueues_the_children(delayed: Delayed, clock: ManualClock, last_run: LastRun) -> None:
    with ExclusiveLease("ci/stuck_jobs", timedelta(minutes=30)):
        result = run_sweep(stuck_jobs, clock=clock)

    assert (result.outcome, result.reason, result.counts["enqueued"]) == ("skipped", "lease_held", 3)
    assert (last_run().reason, last_run().counts["enqueued"]) == ("lease_held", 3)
    assert names(delayed) == [RUNNING, SCHEDULED, CANCELING]


def test_tripped_breaker_still_enqueues_the_children(
    delayed: Delayed, add_builds: AddBuilds, clock: ManualClock, last_run: LastRun
) -> None:
    add_builds(1, "pending", DAY_OLD, DAY_OLD)
    database.execute_sql("ANALYZE ci_builds")

    result = run_sweep(STRICT, clock=clock)

    assert (result.outcome, result.reason, result.counts["enqueued"]) == ("failed", "breaker", 3)
    assert (last_run().reason, last_run().counts["enqueued"]) == ("breaker", 3)
    assert (names(delayed), by_status()) == ([RUNNING, SCHEDULED, CANCELING], {"pending": [1]})


def test_throttled_run_still_enqueues_the_children(
    delayed: Delayed, add_builds: AddBuilds, clock: ManualClock, last_run: LastRun
) -> None:
    add_builds(50, "pending", DAY_OLD, DAY_OLD)
    watchful = dataclasses.replace(stuck_jobs, throttle=ThrottleLimits(replication_lag_s=30), batch_size=1)

    result = run_sweep(watchful, clock=clock, stopping=Impatient(clock), health=Told(DbHealth(99.0, 0, False)))

    assert (result.outcome, result.reason, result.counts["enqueued"]) == ("partial", "gate", 3)
    assert (last_run().reason, last_run().counts["enqueued"]) == ("gate", 3)
    assert len(delayed()) == 3


def test_unreachable_database_still_enqueues_the_children(
    broker: RedisBroker, delayed: Delayed, step_worker: StepWorker, clock: ManualClock
) -> None:
    with unreachable_database():
        result = run_sweep(stuck_jobs, clock=clock)

    assert (result.outcome, result.counts["enqueued"]) == ("failed", 3)
    assert str(result.reason).startswith("database: ")
    assert len(delayed()) == 3


def test_paused_parent_enqueues_no_child_unless_forced(delayed: Delayed, clock: ManualClock) -> None:
    switch(Override(stuck_jobs.name, "paused"))

    paused = run_sweep(stuck_jobs, clock=clock)
    waiting = len(delayed())
    forced = run_sweep(stuck_jobs, clock=clock, force=True)

    assert (paused.outcome, paused.reason, paused.counts["enqueued"], waiting) == ("skipped", "paused", 0, 0)
    assert (forced.outcome, forced.counts["enqueued"], len(delayed())) == ("done", 3, 3)


def test_disabled_parent_enqueues_no_child_unless_forced(delayed: Delayed, clock: ManualClock) -> None:
    disabled = dataclasses.replace(stuck_jobs, enabled=False)

    off = run_sweep(disabled, clock=clock)
    waiting = len(delayed())
    forced = run_sweep(disabled, clock=clock, force=True)

    assert (off.outcome, off.reason, waiting) == ("skipped", "disabled", 0)
    assert (forced.outcome, forced.counts["enqueued"]) == ("done", 3)


def test_plan_shows_the_children_and_enqueues_none(delayed: Delayed, clock: ManualClock) -> None:
    planned = plan(stuck_jobs, clock=clock).as_json()

    assert [each["pass"] for each in planned["passes"]] == ["children", "pending"]
    assert planned["passes"][0]["samples"] == [
        {"child": RUNNING, "delay_s": 900.0},
        {"child": SCHEDULED, "delay_s": 1800.0},
        {"child": CANCELING, "delay_s": 2700.0},
    ]
    assert delayed() == []


def test_child_that_cannot_be_enqueued_fails_the_run_after_its_work(
    delayed: Delayed,
    add_builds: AddBuilds,
    clock: ManualClock,
    last_run: LastRun,
    first_child_fails: None,
    reported: list[dict[str, Any]],
) -> None:
    add_builds(250, "pending", DAY_OLD, DAY_OLD)

    result = run_sweep(stuck_jobs, clock=clock)

    counts = {"enqueued": 2, "dropped": 250, "doomed": 0, "failed": 0}
    assert (result.outcome, result.reason, result.counts) == ("failed", "the broker is away", counts)
    assert (last_run().outcome, last_run().counts) == ("failed", counts)
    assert names(delayed) == [SCHEDULED, CANCELING]
    assert [type(report["error"]) for report in reported] == [ConnectionError]
    with pytest.raises(ConnectionError):
        result.raise_for_failure()


@pytest.mark.parametrize("ending", ["lease_held", "breaker", "gate"])
def test_child_that_cannot_be_enqueued_is_retried_however_the_run_ends(
    delayed: Delayed, add_builds: AddBuilds, clock: ManualClock, last_run: LastRun, first_child_fails: None, ending: str
) -> None:
    add_builds(1, "pending", DAY_OLD, DAY_OLD)
    watchful = dataclasses.replace(stuck_jobs, throttle=ThrottleLimits(replication_lag_s=30))
    perform_ending: dict[str, Callable[[], Any]] = {
        "lease_held": lambda: run_sweep(stuck_jobs, clock=clock),
        "breaker": lambda: run_sweep(STRICT, clock=clock),
        "gate": lambda: run_sweep(
            watchful, clock=clock, stopping=Impatient(clock), health=Told(DbHealth(99.0, 0, False))
        ),
    }
    database.execute_sql("ANALYZE ci_builds")
    held = ExclusiveLease("ci/stuck_jobs", timedelta(minutes=30))
    if ending == "lease_held":
        held.try_obtain()

    result = perform_ending[ending]()

    assert (result.outcome, last_run().outcome, last_run().counts["enqueued"]) == ("failed", "failed", 2)
    with pytest.raises(ConnectionError):
        result.raise_for_failure()


def test_retry_of_the_parent_enqueues_only_the_child_that_is_missing(
    delayed: Delayed, clock: ManualClock, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    with monkeypatch.context():
        request.getfixturevalue("first_child_fails")
        run_sweep(stuck_jobs, clock=clock)
    monkeypatch.undo()

    again = run_sweep(stuck_jobs, clock=clock)

    assert (again.outcome, again.counts["enqueued"]) == ("done", 1)
    assert sorted(names(delayed)) == sorted(DELAYS)


def test_parent_stopped_by_a_shutdown_does_not_duplicate_its_children(delayed: Delayed, clock: ManualClock) -> None:
    stopping = threading.Event()
    stopping.set()

    stopped = run_sweep(stuck_jobs, clock=clock, stopping=stopping)
    again = run_sweep(stuck_jobs, clock=clock)

    assert (stopped.counts["enqueued"], again.counts["enqueued"], len(delayed())) == (3, 0, 3)


def test_disabled_child_is_enqueued_and_skips_its_run(
    broker: RedisBroker, delayed: Delayed, clock: ManualClock
) -> None:
    disabled = dataclasses.replace(drop_canceling, enabled=False)

    run_sweep(stuck_jobs, clock=clock)
    result = run_sweep(disabled, clock=clock)

    assert len(delayed()) == 3
    assert (result.outcome, result.reason) == ("skipped", "disabled")


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

    assert (manual.counts["enqueued"], hourly.counts["enqueued"]) == (3, 0)
    assert (first, both) == ([("parent", "done")] * 3, [("parent", "done")] * 6)


def test_child_that_waits_for_its_retry_is_not_duplicated(
    delayed: Delayed, step_worker: StepWorker, clock: ManualClock, admin: Connection
) -> None:
    run_sweep(stuck_jobs, clock=clock)
    with admin.cursor() as cursor:
        cursor.execute("ALTER TABLE ci_builds RENAME TO elsewhere")
        failed = run_children(step_worker)
        cursor.execute("ALTER TABLE elsewhere RENAME TO ci_builds")

    again = run_sweep(stuck_jobs, clock=clock)

    assert failed == [("parent", "failed")] * 3
    assert (again.counts["enqueued"], len(delayed())) == (0, 3)
    assert sorted(str(outcome) for _, outcome in run_children(step_worker)) == ["done"] * 3 + ["failed"] * 3


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
    assert len(waits) == 3
    assert max(waits) <= 600_000


def test_child_that_runs_when_its_parent_comes_again_runs_once_more(
    delayed: Delayed, step_worker: StepWorker, clock: ManualClock, add_builds: AddBuilds
) -> None:
    add_builds(1, "canceling", STALE, STALE)

    def parent_comes_again(sender: str, **told: Any) -> None:
        for _ in range(2):
            run_sweep(stuck_jobs, clock=clock)

    run_sweep(stuck_jobs, clock=clock)
    step_worker.come_due()
    with events.build_dropped.connected_to(parent_comes_again):
        for message in iter(step_worker.fetch, None):
            step_worker.run(message)

    runs = [row.outcome for row in Run.select().where(Run.worker == CANCELING)]
    assert runs == ["done", "done"]
    assert names(delayed).count(CANCELING) == 0
