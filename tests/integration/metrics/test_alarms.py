"""Alert metrics after runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta

import pytest
import redis
from psycopg2.extensions import connection as Connection

from housekeeping import Alerts, ExclusiveLease, Lease
from tests.declarations import changed
from tests.integration.conftest import AddStatuses, Locked
from tests.integration.metrics.conftest import Exported
from tests.internals.database import Database
from tests.internals.engine import run_sweep
from tests.internals.ledger import Run
from tests.internals.workers import status_sweep as sweep

NARROW = changed(sweep, batch=1, runtime=timedelta(microseconds=1))
WAITING = replace(NARROW, alerts=Alerts(backlog=5, failed_runs=2))
Rings = Callable[[str], float | None]


@pytest.fixture
def is_active(exported: Exported, redis_client: redis.Redis) -> Rings:
    return lambda alarm: exported("housekeeping_alarm", worker=sweep.name, alarm=alarm)


def test_alert_is_active_one_beyond_its_limit_and_not_at_it(
    add_statuses: AddStatuses, is_active: Rings, exported: Exported
) -> None:
    add_statuses(7, "now() - interval '1 hour'")
    run_sweep(WAITING)  # one is processed, six wait
    beyond = [is_active("backlog"), exported("housekeeping_backlog_rows", worker=sweep.name)]

    run_sweep(WAITING)

    assert beyond == [1, 6]
    assert [is_active("backlog"), exported("housekeeping_backlog_rows", worker=sweep.name)] == [0, 5]


def test_failed_runs_alert_is_active_from_its_limit_until_a_success(
    postgres: Database, admin: Connection, is_active: Rings, exported: Exported
) -> None:
    after_each = []
    for _ in range(2):
        run_sweep(WAITING)  # its table is missing
        after_each.append((is_active("last_run"), is_active("failed_runs"), is_active("unseen")))
    with admin.cursor() as cursor:
        cursor.execute("CREATE TABLE user_statuses (user_id bigint PRIMARY KEY, clear_status_at timestamptz)")

    run_sweep(WAITING)

    assert after_each == [(1, 0, 1), (1, 1, 1)]
    assert (is_active("last_run"), is_active("failed_runs"), is_active("unseen")) == (0, 0, 0)
    assert exported("housekeeping_runs_total", worker=sweep.name, outcome="failed") == 2


def test_late_alert_is_active_until_the_last_late_row_is_gone(add_statuses: AddStatuses, is_active: Rings) -> None:
    promising = replace(NARROW, alerts=Alerts(late=timedelta(hours=2)))
    add_statuses(3, "now() - n * interval '1 hour'")
    after_each = []

    for _ in range(2):
        run_sweep(promising)  # the oldest one is processed
        after_each.append(is_active("late"))

    assert after_each == [1, 0]


def test_row_that_is_locked_during_the_only_batch_counts_as_backlog(
    add_statuses: AddStatuses, locked: Locked, exported: Exported
) -> None:
    add_statuses(3, "now() - n * interval '1 hour'")

    with locked("SELECT FROM user_statuses WHERE user_id = 2 FOR UPDATE"):
        result = run_sweep(sweep)

    assert (result.outcome, result.counts["deleted_rows"]) == ("done", 2)
    assert (Run.get_by_id(result.run_id).backlog, exported("housekeeping_backlog_rows", worker=sweep.name)) == (1, 1)


def test_oldest_row_metric_has_its_age_or_no_sample(
    add_statuses: AddStatuses, exported: Exported, redis_client: redis.Redis
) -> None:
    add_statuses(2, "now() - n * interval '1 hour'")

    run_sweep(NARROW)  # the older of them
    age = exported("housekeeping_oldest_stale_age_seconds", worker=sweep.name)
    run_sweep(NARROW)

    assert age is not None and 3600 <= age < 3660
    assert exported("housekeeping_oldest_stale_age_seconds", worker=sweep.name) == 0


def test_skipped_run_updates_only_the_last_attempt(statuses: object, is_active: Rings, exported: Exported) -> None:
    run_sweep(changed(sweep, enabled=False))

    assert exported("housekeeping_runs_total", worker=sweep.name, outcome="skipped") == 1
    assert exported("housekeeping_last_attempt_timestamp_seconds", worker=sweep.name) is not None
    assert exported("housekeeping_last_run_timestamp_seconds", worker=sweep.name) is None
    assert is_active("last_run") is None


def test_open_run_is_exported_until_it_ends(add_statuses: AddStatuses, exported: Exported, is_active: Rings) -> None:
    add_statuses(2, "now() - interval '1 hour'")
    during: list[float | None] = []

    run_sweep(
        NARROW, on_begin=lambda _: during.append(exported("housekeeping_open_run_timestamp_seconds", worker=sweep.name))
    )

    assert during == [exported("housekeeping_last_attempt_timestamp_seconds", worker=sweep.name)]
    assert exported("housekeeping_open_run_timestamp_seconds", worker=sweep.name) == 0


def test_run_skipped_by_a_held_lease_is_no_attempt(statuses: object, exported: Exported, is_active: Rings) -> None:
    lease = Lease("statuses", timedelta(minutes=10))
    assert ExclusiveLease("statuses", lease.ttl).try_obtain() is not None

    run_sweep(replace(sweep, lease=lease))

    assert exported("housekeeping_runs_total", worker=sweep.name, outcome="skipped") == 1
    assert exported("housekeeping_last_attempt_timestamp_seconds", worker=sweep.name) is None
