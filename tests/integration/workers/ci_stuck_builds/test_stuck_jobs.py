"""Document 6, 前後の処理との関連: the parent that enqueues the others and drops builds stuck in pending."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from datetime import timedelta

import pytest
import redis
from dramatiq.brokers.redis import RedisBroker
from psycopg2.extensions import connection as Connection

from housekeeping.core.errors import DeclarationError
from housekeeping.core.settings import Settings
from housekeeping.leases.lease import ExclusiveLease
from housekeeping.sweeps import actor_registry
from housekeeping.sweeps.engine.runner import run_sweep
from housekeeping.sweeps.insight.plan import dry_run
from housekeeping.testing import ManualClock
from housekeeping.workers.ci_stuck_builds.models import Build
from housekeeping.workers.ci_stuck_builds.worker import stuck_jobs
from tests.integration.workers.ci_stuck_builds.tables import NOW, STALE, AddBuilds, Delayed, Refuse, by_status, lines

DAY_AGO = f"{NOW} - interval '1 day'"
DAY_OLD = f"{DAY_AGO} - interval '1 microsecond'"
NOTHING = {"enqueued": 0, "dropped": 0, "doomed": 0, "failed": 0}


def test_the_children_are_enqueued_15_30_and_45_minutes_ahead(
    broker: RedisBroker, delayed: Delayed, clock: ManualClock
) -> None:
    # 実行スケジュール: StuckCiJobsWorkerからのperform_in, 45分後; 入力パラメータ: なし.
    result = run_sweep(stuck_jobs, clock=clock)

    messages = delayed()
    assert (result.outcome, result.counts) == ("done", {**NOTHING, "enqueued": 3})
    assert [
        (message.actor_name, round((message.options["eta"] - message.message_timestamp) / 60_000))
        for message in messages
    ] == [
        ("ci.stuck_builds.drop_running", 15),
        ("ci.stuck_builds.drop_scheduled", 30),
        ("ci.stuck_builds.drop_canceling", 45),
    ]
    assert [(message.args, message.kwargs) for message in messages] == [((), {})] * 3


def test_a_second_run_within_the_hour_does_not_double_the_children(
    broker: RedisBroker, delayed: Delayed, clock: ManualClock
) -> None:
    run_sweep(stuck_jobs, clock=clock)

    again = run_sweep(stuck_jobs, clock=clock)

    assert (again.outcome, again.counts) == ("done", NOTHING)
    assert len(delayed()) == 3


def test_children_are_enqueued_despite_a_failing_run(
    broker: RedisBroker, delayed: Delayed, clock: ManualClock, admin: Connection
) -> None:
    # The children are enqueued even if the sweep fails.
    with admin.cursor() as cursor:
        cursor.execute("ALTER TABLE ci_builds RENAME TO elsewhere")

    result = run_sweep(stuck_jobs, clock=clock)

    assert (result.outcome, result.counts["enqueued"]) == ("failed", 3)
    assert len(delayed()) == 3


def test_run_after_a_failed_one_enqueues_the_children(
    broker: RedisBroker, clock: ManualClock, admin: Connection, redis_client: redis.Redis, settings: Settings
) -> None:
    with admin.cursor() as cursor:
        cursor.execute("ALTER TABLE ci_builds RENAME TO elsewhere")
        run_sweep(stuck_jobs, clock=clock)
        cursor.execute("ALTER TABLE elsewhere RENAME TO ci_builds")
    # The children have begun meanwhile.
    redis_client.delete(*redis_client.keys(f"{settings.namespace}:dedup:*"))

    result = run_sweep(stuck_jobs, clock=clock)

    assert (result.outcome, result.counts["enqueued"]) == ("done", 3)


def test_builds_pending_for_more_than_a_day_are_dropped(
    broker: RedisBroker, add_builds: AddBuilds, clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    add_builds(1, "pending", DAY_OLD, DAY_OLD, first_id=1)
    add_builds(1, "pending", DAY_AGO, DAY_OLD, first_id=2)
    add_builds(1, "pending", DAY_OLD, DAY_AGO, first_id=3)
    add_builds(1, "pending", f"{DAY_AGO} + interval '1 microsecond'", DAY_OLD, first_id=4)
    add_builds(1, "canceling", DAY_OLD, DAY_OLD, first_id=5)

    result = run_sweep(stuck_jobs, clock=clock)

    assert result.counts == {"enqueued": 3, "dropped": 1, "doomed": 0, "failed": 0}
    assert by_status() == {"failed": [1], "pending": [2, 3, 4], "canceling": [5]}
    assert Build.get(Build.id == 1).failure_reason == 3
    assert len(lines(caplog, "Cleaning pending, timed-out builds")) == 1
    assert [line["status"] for line in lines(caplog, "Dropping outdated build")] == ["pending"]


def test_pending_builds_are_doomed_by_the_same_rules(
    broker: RedisBroker, add_builds: AddBuilds, refuse: Refuse, clock: ManualClock
) -> None:
    add_builds(250, "pending", DAY_OLD, DAY_OLD)
    refuse("OLD.id = 3 OR (OLD.id = 2 AND NEW.failure_reason IS DISTINCT FROM 12)")

    result = run_sweep(stuck_jobs, clock=clock)

    assert result.counts == {"enqueued": 3, "dropped": 248, "doomed": 1, "failed": 1}


def test_its_lease_is_its_own(broker: RedisBroker, clock: ManualClock) -> None:
    # 排他制御: 親ワーカーとは別のロックを使用
    with ExclusiveLease("ci/stuck_jobs", timedelta(minutes=30)):
        held = run_sweep(stuck_jobs, clock=clock)
    with ExclusiveLease("ci/stuck_builds/drop_canceling", timedelta(minutes=30)):
        free = run_sweep(stuck_jobs, clock=clock)

    assert (held.outcome, held.reason) == ("skipped", "lease_held")
    assert free.outcome == "done"


def test_a_dry_run_enqueues_and_drops_nothing(
    broker: RedisBroker, delayed: Delayed, add_builds: AddBuilds, clock: ManualClock
) -> None:
    add_builds(5, "pending", DAY_OLD, DAY_OLD)

    result = dry_run(stuck_jobs, clock=clock)

    assert result.counts == {"enqueued": 3, "dropped": 5, "doomed": 0, "failed": 0}
    assert (delayed(), len(by_status()["pending"])) == ([], 5)


def test_missing_actor_is_reported(builds: type[Build], clock: ManualClock) -> None:
    actor_registry.forget_all()

    result = run_sweep(stuck_jobs, clock=clock)

    assert isinstance(result.error, DeclarationError)
    assert result.reason == (
        "no actor 'ci.stuck_builds.drop_running' is registered; call housekeeping.install(broker) first"
    )


def test_the_command_line_enqueues_by_the_settings(
    builds: type[Build], environment: dict[str, str], delayed: Delayed, add_builds: AddBuilds
) -> None:
    add_builds(3, "pending", STALE, STALE)

    command = [sys.executable, "-m", "housekeeping", "run", "ci.stuck_jobs", "--json"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)

    said = json.loads(done.stdout)
    assert (done.returncode, said["outcome"]) == (0, "done")
    assert said["counts"] == {"enqueued": 3, "dropped": 3, "doomed": 0, "failed": 0}
    assert [message.options["trigger"] for message in delayed()] == ["parent"] * 3
