"""Throttle: a run is slow while the database is not well, and stops when that lasts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, timedelta
from typing import Any

import pytest

from housekeeping import Alerts, Settings, Throttle
from housekeeping.testing.stubs import ManualClock
from housekeeping.workers.user_status_cleanup.models import UserStatus
from tests.declarations import changed
from tests.integration.conftest import AddStatuses, Locked, Plant
from tests.integration.sweeps.conftest import History
from tests.integration.sweeps.engine.sizing import DUE, LONG_DUE, SMALL, WELL, Impatient, Told, run_told
from tests.internals.core import ThrottleSettings, WorkerSettings
from tests.internals.database import database
from tests.internals.engine import DbHealth, run_sweep
from tests.internals.insight import worker_status
from tests.internals.ledger import Counts, Run
from tests.internals.workers import uploads_sweep as uploads
from tests.session_settings import set_in_session

LONG = changed(SMALL, runtime=timedelta(minutes=10))
LAGGING = DbHealth(99.0, 0, False)
WATCHFUL = changed(LONG, throttle=Throttle(vacuum=True))


def logged(caplog: pytest.LogCaptureFixture, event: str) -> list[Any]:
    return [record for record in caplog.records if record.getMessage() == event]


@pytest.mark.parametrize(
    ("signs", "gate"),
    [
        (DbHealth(30.1, 0, False), "replication_lag_s"),
        (DbHealth(0.0, 11, False), "waiting_locks"),
        (DbHealth(0.0, 0, True), "vacuum"),
    ],
)
def test_run_that_starts_throttled_waits_then_works_slowly_and_ends(
    add_statuses: AddStatuses,
    clock: ManualClock,
    last_run: Callable[[], Run],
    caplog: pytest.LogCaptureFixture,
    signs: DbHealth,
    gate: str,
) -> None:
    add_statuses(1000, DUE)
    stopping = Impatient(clock)

    with caplog.at_level("INFO"):
        result = run_told(WATCHFUL, clock=clock, stopping=stopping, health=Told(signs))

    assert (result.outcome, result.reason, result.exit_code, result.error) == ("partial", "gate", 0, None)
    assert (last_run().outcome, last_run().reason, last_run().error) == ("partial", "gate", None)
    assert last_run().counts["throttled"]["gate"] == gate
    assert 10 <= result.counts["deleted_rows"] == 1000 - UserStatus.select().count() <= 120
    assert 20 < sum(stopping.waits) <= 22, "ten seconds until it begins, and ten in which it is slow"
    assert [record.__dict__["gate"] for record in logged(caplog, "Throttled run continues slowly")] == [gate]
    assert [record.__dict__["gate"] for record in logged(caplog, "Still throttled, ending the run")] == [gate]


@pytest.mark.parametrize("wait_s", [0, 3600])
def test_throttled_run_takes_a_batch_however_long_it_waits(
    add_statuses: AddStatuses, clock: ManualClock, wait_s: float
) -> None:
    add_statuses(1000, DUE)
    short = changed(SMALL, throttle=Throttle(wait_s=wait_s))

    result = run_told(short, clock=clock, stopping=Impatient(clock), health=Told(LAGGING))

    assert result.outcome == "partial"
    assert result.counts["deleted_rows"] >= 10


def test_three_throttled_runs_in_a_row_alert_until_one_is_not(
    add_statuses: AddStatuses, clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    add_statuses(1000, DUE)
    without_promise = changed(LONG, alerts=replace(LONG.alerts, late=None))

    def alerts() -> list[str]:
        return [
            alarm.text for alarm in worker_status(without_promise, clock.now(), UTC).alarms if alarm.name == "throttled"
        ]

    seen = []
    for signs in (LAGGING, LAGGING, LAGGING, WELL):
        run_told(without_promise, clock=clock, stopping=Impatient(clock), health=Told(signs))
        seen.append(alerts())

    assert seen[:2] == [[], []] and seen[3] == []
    assert seen[2] == [
        "replication_lag_s 99 > 30 slowed the last 3 runs and ended them early; each processed a few rows. "
        "Fix the cause, or set another limit: gates.replication_lag_s"
    ]
    assert [record.__dict__["alarm"] for record in logged(caplog, "Alert")] == ["throttled"]


def test_run_with_a_wrong_clock_between_throttled_ones_hides_no_alert(
    add_statuses: AddStatuses, clock: ManualClock, caplog: pytest.LogCaptureFixture, history: History
) -> None:
    add_statuses(1000, DUE)

    for _ in range(3):
        history(1, 0, "failed", "clock")
        run_told(LONG, clock=clock, stopping=Impatient(clock), health=Told(LAGGING))

    assert "throttled" in [record.__dict__["alarm"] for record in logged(caplog, "Alert")]
    assert "throttled" in [alarm.name for alarm in worker_status(LONG, clock.now(), UTC).alarms]


def test_throttled_run_that_waits_too_long_for_a_lock_does_not_fail(
    add_statuses: AddStatuses, clock: ManualClock, locked: Locked
) -> None:
    add_statuses(5, DUE)
    set_in_session(database, "lock_timeout = '50ms'")

    with locked("LOCK TABLE user_statuses IN ACCESS EXCLUSIVE MODE"):
        result = run_told(
            changed(LONG, alerts=Alerts()),
            clock=clock,
            stopping=Impatient(clock),
            health=Told(DbHealth(0.0, 11, False)),
        )

    assert (result.outcome, result.reason, result.exit_code) == ("partial", "gate", 0)


def test_throttled_run_ends_when_every_probed_row_waits_for_a_lock(
    add_statuses: AddStatuses, plant: Plant, clock: ManualClock, locked: Locked, last_run: Callable[[], Run]
) -> None:
    # Each deletion waits for a row that another session holds.
    add_statuses(20, DUE)
    database.execute_sql("CREATE TABLE totals (number integer); INSERT INTO totals VALUES (50)")
    plant("DELETE ON user_statuses", "true", "UPDATE totals SET number = number - 1")
    set_in_session(database, "lock_timeout = '50ms'")

    with locked("UPDATE totals SET number = number"):
        result = run_told(LONG, clock=clock, stopping=Impatient(clock), health=Told(LAGGING))

    assert (result.outcome, result.reason, result.counts.get("failed", 0)) == ("partial", "gate", 0)
    assert last_run().reason == "gate"


def test_value_at_exactly_the_limit_does_not_throttle(add_statuses: AddStatuses, clock: ManualClock) -> None:
    add_statuses(5, DUE)
    stopping = Impatient(clock)

    result = run_told(WATCHFUL, clock=clock, stopping=stopping, health=Told(DbHealth(30.0, 10, False)))

    assert (result.outcome, stopping.waits) == ("done", [])


def test_run_starts_when_the_database_recovers_in_time(add_statuses: AddStatuses, clock: ManualClock) -> None:
    add_statuses(5, DUE)
    stopping = Impatient(clock)
    lagging = DbHealth(99.0, 0, False)

    result = run_told(LONG, clock=clock, stopping=stopping, health=Told(lagging, lagging, lagging, WELL))

    assert (result.outcome, result.counts["deleted_rows"]) == ("done", 5)
    assert 6 <= sum(stopping.waits) <= 9


def test_throttled_run_slows_down_then_ends_and_the_next_resumes(
    add_statuses: AddStatuses, clock: ManualClock, last_run: Callable[[], Run]
) -> None:
    add_statuses(500, DUE)
    stopping = Impatient(clock)
    told = Told(WELL, DbHealth(99.0, 0, False))

    def on_batch(counts: Counts) -> None:
        if counts["batches"] == 1:
            clock.advance(timedelta(seconds=2))

    stopped = run_told(LONG, clock=clock, stopping=stopping, health=told, on_batch=on_batch)
    before = UserStatus.select().count()
    add_statuses(1, LONG_DUE, first_id=1000)
    next_one = run_told(LONG, clock=clock, health=Told(WELL))

    assert (stopped.outcome, stopped.reason) == ("partial", "gate")
    assert stopped.counts["deleted_rows"] == 500 - before > 20
    assert stopping.waits[:5] == [0.1, 0.2, 0.4, 0.8, 1.0] and max(stopping.waits) == 1.0
    assert 10 < sum(stopping.waits) <= 11
    assert (next_one.outcome, next_one.counts["deleted_rows"]) == ("done", before + 1)


def test_run_returns_to_full_speed_when_the_database_recovers(add_statuses: AddStatuses, clock: ManualClock) -> None:
    add_statuses(100, DUE)
    stopping = Impatient(clock)
    told = Told(WELL, DbHealth(99.0, 0, False), WELL)

    result = run_told(
        LONG, clock=clock, stopping=stopping, health=told, on_batch=lambda counts: clock.advance(timedelta(seconds=1))
    )

    # Shut at 2 s, looked at again at 4 s.
    assert (result.outcome, stopping.waits) == ("done", [0.1, 0.2])


def test_health_is_checked_at_most_every_two_seconds(add_statuses: AddStatuses, clock: ManualClock) -> None:
    add_statuses(95, DUE)
    told = Told(WELL)

    run_told(LONG, clock=clock, health=told, on_batch=lambda counts: clock.advance(timedelta(seconds=0.5)))

    # Before the first batch, and after 2 s and 4 s of its ten.
    assert told.looks == [['"user_statuses"']] * 3


def test_unavailable_health_check_is_logged_once_and_ignored(
    add_statuses: AddStatuses, clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    add_statuses(95, DUE)
    blind = Told(DbHealth(None, None, None))

    with caplog.at_level("INFO"):
        result = run_told(
            WATCHFUL,
            clock=clock,
            stopping=Impatient(clock),
            health=blind,
            on_batch=lambda counts: clock.advance(timedelta(seconds=2)),
        )

    unknown = logged(caplog, "Health check unavailable, continuing without it")
    assert (result.outcome, len(blind.looks) > 2) == ("done", True)
    assert [record.__dict__["gate"] for record in unknown] == ["replication_lag_s", "waiting_locks", "vacuum"]
    assert {record.levelname for record in unknown} == {"INFO"}


def test_unreadable_statistics_view_is_ignored(
    add_statuses: AddStatuses, settings: Settings, caplog: pytest.LogCaptureFixture
) -> None:
    add_statuses(15, DUE)
    database.execute_sql("CREATE VIEW pg_stat_replication AS SELECT 1 AS of_another_release")
    set_in_session(database, f"search_path TO {settings.namespace}, pg_catalog")

    with caplog.at_level("INFO"):
        result = run_sweep(SMALL)

    assert (result.outcome, result.counts["deleted_rows"]) == ("done", 15)
    [*_, error] = logged(caplog, "Health check unavailable, continuing without it")[0].__dict__["error"].split("\n")
    assert 'column "pid" does not exist' in error


def test_slow_own_batches_throttle_the_run_until_they_are_fast(add_statuses: AddStatuses, clock: ManualClock) -> None:
    add_statuses(100, DUE)
    own = changed(LONG, throttle=Throttle(None, None, batch_s=1.5))
    stopping, told = Impatient(clock), Told(WELL)
    seconds = iter([10.0, *[0.1] * 10])

    result = run_told(
        own,
        clock=clock,
        stopping=stopping,
        health=told,
        on_batch=lambda counts: clock.advance(timedelta(seconds=next(seconds))),
    )

    assert (result.outcome, told.looks) == ("done", [])
    # Until the next look, which is about the batches since the last one.
    assert stopping.waits == [0.1, 0.2, 0.4, 0.8, 1.0]


def test_shutdown_ends_the_wait_of_a_throttled_run(
    add_statuses: AddStatuses, clock: ManualClock, last_run: Callable[[], Run]
) -> None:
    class Stopped(Impatient):
        def wait(self, timeout: float | None = None) -> bool:
            self.set()
            return super().wait(timeout)

    add_statuses(5, DUE)
    stopping = Stopped(clock)

    result = run_told(LONG, clock=clock, stopping=stopping, health=Told(DbHealth(99.0, 0, False)))

    assert (result.outcome, result.reason, len(stopping.waits)) == ("partial", "shutdown", 1)
    assert last_run().outcome == "partial"


def test_worker_without_throttle_or_tables_runs_no_health_check(
    add_statuses: AddStatuses, clock: ManualClock, redis_client: object
) -> None:
    told = Told(DbHealth(99.0, 99, True))

    off = run_told(changed(LONG, throttle=Throttle(None, None)), clock=clock, health=told)
    run_told(uploads, clock=clock, health=told)

    assert (off.outcome, told.looks) == ("done", [])


def test_throttle_limits_are_set_singly_and_null_disables_one() -> None:
    settings = WorkerSettings(gates=ThrottleSettings(replication_lag_s=None, wait_s=60))

    assert SMALL.configured(settings).limits.throttle == Throttle(replication_lag_s=None, waiting_locks=10, wait_s=60)
    assert SMALL.limits.throttle == Throttle(
        replication_lag_s=30, waiting_locks=10, vacuum=False, batch_s=None, wait_s=10
    )
