"""Document 6, 前後の処理との関連: the parent that enqueues the others, and builds stuck in pending."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from datetime import timedelta

import pytest
from dramatiq.brokers.redis import RedisBroker
from psycopg2.extensions import connection as Connection

from housekeeping import ExclusiveLease
from housekeeping.testing.stubs import ManualClock
from housekeeping.workers.ci_stuck_builds.models import Build
from tests.integration.middleware.applications import queued
from tests.integration.workers.ci_stuck_builds.tables import (
    NOTHING_DROPPED,
    NOW,
    AddBuilds,
    Delayed,
    by_status,
    lines,
)
from tests.internals.core import DeclarationError
from tests.internals.engine import actor_registry, run_sweep
from tests.internals.insight import dry_run
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


def test_a_dry_run_enqueues_nothing(broker: RedisBroker, delayed: Delayed, clock: ManualClock) -> None:
    result = dry_run(stuck_jobs, clock=clock)

    assert result.counts == {"enqueued": 4, "deduplicated": 0}
    assert (delayed(), queued(broker, "cronjob")) == ([], [])


def test_missing_actor_is_reported(builds: type[Build], clock: ManualClock) -> None:
    actor_registry.forget_all()

    result = run_sweep(stuck_jobs, clock=clock)

    assert isinstance(result.error, DeclarationError)
    assert result.reason == (
        "no actor 'ci.stuck_builds.drop_pending' is registered; call housekeeping.install(broker) first"
    )


@pytest.mark.slow
def test_the_command_line_enqueues_by_the_settings(
    builds: type[Build], environment: dict[str, str], broker: RedisBroker, delayed: Delayed
) -> None:
    command = [sys.executable, "-m", "housekeeping", "run", "ci.stuck_jobs", "--json"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)

    said = json.loads(done.stdout)
    assert (done.returncode, said["outcome"]) == (0, "done")
    assert said["counts"] == {"enqueued": 4, "deduplicated": 0}
    messages = [*queued(broker, "cronjob"), *delayed()]
    assert [(message.actor_name, message.options["trigger"]) for message in messages] == [
        (name, "parent") for name in DELAYS
    ]
