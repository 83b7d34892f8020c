"""Snapshots while servers are unavailable: which one is named, and what stays."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
import redis

from housekeeping import Settings
from housekeeping.workers.user_status_cleanup.models import UserStatus
from tests.integration.conftest import Beat, Locked
from tests.internals.core import MAIN
from tests.internals.database import Database, connect_to, database
from tests.internals.ledger import Heartbeat, Run
from tests.internals.web import SnapshotReader, database_server
from tests.internals.workers import status_sweep as sweep

NOWHERE = "unix:///nowhere/redis.sock"
SWEEPS = {sweep.name: sweep}


@pytest.fixture
def reader(settings: Settings, postgres: Database, redis_client: redis.Redis) -> SnapshotReader:
    postgres.create_tables([UserStatus])
    return SnapshotReader(settings, SWEEPS)


def without_redis(settings: Settings) -> SnapshotReader:
    return SnapshotReader(settings.model_copy(update={"redis_url": NOWHERE, "broker_url": None}), SWEEPS)


def test_unavailable_database_is_named_and_its_workers_stay(reader: SnapshotReader, postgres: Database) -> None:
    before = reader.read(None)
    with database.using(MAIN):
        database.initialize(connect_to("postgresql://127.0.0.1:1/nowhere"))
    try:
        during = reader.read(before)
    finally:
        database.initialize(postgres)

    assert during.statuses == before.statuses and during.statuses.keys() == {sweep.name}
    [line] = during.errors
    assert line.startswith("PostgreSQL did not answer: ") and "Redis" not in line
    assert f"the workers are shown as of {before.at:%Y-%m-%d %H:%M:%S} UTC" in line
    assert during.queues == before.queues and "Redis is unavailable" not in during.leases_note
    assert reader.read(during).errors == []


def test_outage_keeps_the_time_of_its_beginning(settings: Settings, reader: SnapshotReader) -> None:
    first = without_redis(settings).read(None)
    later = without_redis(settings).read(first)

    assert later.unavailable["Redis"].since == first.unavailable["Redis"].since


def test_unavailable_redis_is_named_and_the_queues_stay(settings: Settings, reader: SnapshotReader) -> None:
    before = reader.read(None)

    during = without_redis(settings).read(before)

    [line] = during.errors
    assert line.startswith("Redis did not answer") and "the queues are shown as of" in line
    assert during.queues == before.queues and during.clocks.keys() == {MAIN}
    assert during.leases_note.startswith("Redis is unavailable; these are the leases of open runs")


def test_locked_ledger_is_reported_without_waiting_for_it(
    reader: SnapshotReader, settings: Settings, locked: Locked, statements: list[str]
) -> None:
    before = reader.read(None)
    statements.clear()
    with locked(f"LOCK TABLE {settings.schema_name}.runs"):
        during = reader.read(before)

    assert "canceling statement due to lock timeout" in during.unavailable[database_server(MAIN)].error
    assert during.statuses == before.statuses
    asked = [place for place, statement in enumerate(statements) if '"runs"' in statement]
    assert len(asked) == 1 and "lock_timeout" in statements[asked[0] - 1]


def test_worker_without_any_run_is_an_alert_after_three_periods(reader: SnapshotReader, beat: Beat) -> None:
    alive = Heartbeat(kind="scheduler", host="h", pid=7, version="1", up_s=179.0)
    beat("scheduler", alive)
    early = reader.read(None)
    beat("scheduler", alive.model_copy(update={"up_s": 240.0}))
    late = reader.read(None)

    assert [each.name for each in early.statuses[sweep.name].alarms] == []
    [alert] = late.statuses[sweep.name].alarms
    assert alert.name == "overdue" and "it has never run" in str(alert) and alert.since is not None


def test_worker_whose_ticks_were_all_missed_is_overdue(reader: SnapshotReader) -> None:
    past = datetime.now(UTC) - timedelta(minutes=10)
    times = dict.fromkeys(("started_at", "heartbeat_at", "finished_at", "tick"), past)
    Run.create(worker=sweep.name, trigger="schedule", outcome="missed", reason="no_scheduler", **times)

    found = reader.read(None)

    assert [each.name for each in found.statuses[sweep.name].alarms] == ["overdue"]
