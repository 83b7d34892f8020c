"""Metrics of the whole installation, such as queues and pauses, as one process reads them every half minute."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from math import isnan
from typing import Any

import pytest
import redis

from housekeeping import Settings
from housekeeping.workers.user_status_cleanup.models import UserStatus
from tests.integration.metrics.conftest import Exported
from tests.internals.database import Database
from tests.internals.embedded import embedded
from tests.internals.insight import InstallationWatch
from tests.internals.ledger import AlertRow, Override, Run, switch
from tests.internals.workers import status_sweep as sweep

QUEUE = sweep.queue


def again(postgres: Database) -> None:
    postgres.execute_sql(f'DELETE FROM "{AlertRow._meta.schema}".evaluations')


def active() -> dict[tuple[str, str], int]:
    """Return the ids of the active alerts by name and subject."""
    rows: Any = AlertRow.select().where(AlertRow.ended_at.is_null())
    return {(row.name, row.subject): row.id for row in rows}


def test_queues_pauses_and_open_runs_are_exported(
    settings: Settings, postgres: Database, redis_client: redis.Redis, exported: Exported
) -> None:
    postgres.create_tables([UserStatus])
    sent = datetime.now(UTC) - timedelta(minutes=10)
    message = {"message_timestamp": sent.timestamp() * 1000, "options": {}}
    key = f"{settings.namespace}:broker:{QUEUE}"
    redis_client.hset(f"{key}.msgs", "m1", json.dumps(message))
    redis_client.rpush(key, "m1")
    redis_client.zadd(f"{key}.XQ", {"m2": sent.timestamp() * 1000, "m3": sent.timestamp() * 1000})
    switch(Override(sweep.name, "paused"))
    at = datetime.now(UTC)
    Run.insert(worker=sweep.name, trigger="schedule", started_at=at, heartbeat_at=at).execute()

    InstallationWatch(settings, {sweep.name: sweep}).look()

    lengths = [
        exported("housekeeping_queue_messages", queue=QUEUE, state=each) for each in ("waiting", "delayed", "dead")
    ]
    assert lengths == [1, 0, 2]
    age_s = exported("housekeeping_queue_oldest_message_age_seconds", queue=QUEUE) or 0
    assert 600 <= age_s < 900
    assert exported("housekeeping_worker_paused", worker=sweep.name) == 1
    assert exported("housekeeping_worker_open_runs", worker=sweep.name) == 1
    assert (exported("housekeeping_installation_read_timestamp_seconds") or 0) >= at.timestamp()


def test_empty_queue_has_no_age_and_an_unreadable_one_is_unknown(
    settings: Settings, postgres: Database, redis_client: redis.Redis, exported: Exported
) -> None:
    postgres.create_tables([UserStatus])
    InstallationWatch(settings, {sweep.name: sweep}).look()
    empty = exported("housekeeping_queue_oldest_message_age_seconds", queue=QUEUE)
    again(postgres)
    away = settings.model_copy(update={"redis_url": "unix:///nowhere/redis.sock", "broker_url": None})

    InstallationWatch(away, {sweep.name: sweep}).look()

    assert empty == 0
    for state in ("waiting", "delayed", "dead"):
        assert isnan(exported("housekeeping_queue_messages", queue=QUEUE, state=state) or 0)
    assert isnan(exported("housekeeping_queue_oldest_message_age_seconds", queue=QUEUE) or 0)
    assert exported("housekeeping_worker_paused", worker=sweep.name) == 0


def test_without_the_database_everything_is_unknown(settings: Settings, postgres: Database, exported: Exported) -> None:
    postgres.create_tables([UserStatus])
    watch = InstallationWatch(settings, {sweep.name: sweep})
    watch.look()
    known = exported("housekeeping_worker_open_runs", worker=sweep.name)
    read_at = exported("housekeeping_installation_read_timestamp_seconds")
    postgres.execute_sql(f'DROP TABLE "{AlertRow._meta.schema}".evaluations')

    with pytest.raises(Exception, match="evaluations"):
        watch.look()

    assert known == 0
    assert isnan(exported("housekeeping_worker_open_runs", worker=sweep.name) or 0)
    assert isnan(exported("housekeeping_queue_messages", queue=QUEUE, state="dead") or 0)
    assert exported("housekeeping_installation_read_timestamp_seconds") == read_at


def test_redis_gone_between_two_readings_is_an_alert_until_it_is_back(
    settings: Settings, postgres: Database, exported: Exported
) -> None:
    postgres.create_tables([UserStatus])
    at = datetime.now(UTC)
    Run.insert(worker=sweep.name, trigger="schedule", started_at=at, heartbeat_at=at).execute()
    with embedded.start(postgres=False) as servers:
        told = settings.model_copy(update={"redis_url": servers.redis_url, "broker_url": None})
        watch = InstallationWatch(told, {sweep.name: sweep})

        watch.look()
        before = active()
        servers.kill("redis")
        again(postgres)
        watch.look()
        during, waiting = active(), exported("housekeeping_queue_messages", queue=QUEUE, state="waiting")
        paused = exported("housekeeping_worker_paused", worker=sweep.name)
        servers.start("redis")
        again(postgres)
        watch.look()

    assert before.keys() == {("no_worker", ""), ("no_scheduler", "")}
    # What Redis tells stays as it was, and what the database tells is known.
    assert during.keys() - before.keys() == {("unavailable", "Redis")} and during.items() >= before.items()
    assert isnan(waiting or 0) and paused == 0
    assert active() == before
    assert exported("housekeeping_queue_messages", queue=QUEUE, state="waiting") == 0


def test_full_redis_is_exported_until_it_has_space_and_unknown_once_it_is_gone(
    settings: Settings, postgres: Database, exported: Exported
) -> None:
    postgres.create_tables([UserStatus])
    seen = []
    with embedded.start(postgres=False) as servers, redis.Redis.from_url(servers.redis_url) as client:
        read = settings.model_copy(update={"redis_url": servers.redis_url, "broker_url": None})
        watch = InstallationWatch(read, {sweep.name: sweep})
        for maxmemory in (0, 1, 0):
            client.config_set("maxmemory", maxmemory)
            again(postgres)
            watch.look()
            seen.append(exported("housekeeping_server_full", server="Redis"))
    again(postgres)
    watch.look()

    assert seen == [0, 1, 0]
    assert isnan(exported("housekeeping_server_full", server="Redis") or 0)
    assert exported("housekeeping_server_full", server="PostgreSQL, database main") == 0


def test_postgres_whose_runs_met_a_full_disk_is_exported(
    settings: Settings, postgres: Database, exported: Exported
) -> None:
    postgres.create_tables([UserStatus])
    past = dict.fromkeys(("started_at", "heartbeat_at", "finished_at"), datetime.now(UTC) - timedelta(minutes=1))
    error = {"outcome": "failed", "reason": "disk full: could not extend file", "error": "could not extend file"}
    Run.insert(worker=sweep.name, trigger="schedule", **error, **past).execute()

    InstallationWatch(settings, {sweep.name: sweep}).look()

    assert exported("housekeeping_server_full", server="PostgreSQL, database main") == 1
    assert exported("housekeeping_server_full", server="Redis") == 0
