"""Snapshots while servers are unavailable: which one is named, and what stays."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
import redis

from housekeeping import Settings
from housekeeping.workers.user_status_cleanup.models import UserStatus
from tests.faults import unavailable_database
from tests.integration.conftest import Beat, Locked, Plant
from tests.internals.core import MAIN
from tests.internals.database import Database
from tests.internals.embedded import embedded
from tests.internals.ledger import Erasure, Evaluation, Heartbeat, Run
from tests.internals.web import SnapshotReader, database_server
from tests.internals.workers import status_sweep as sweep

NOW = datetime.now(UTC)
PAST = dict.fromkeys(("started_at", "heartbeat_at", "finished_at", "tick"), NOW - timedelta(minutes=2))
NOWHERE = "unix:///nowhere/redis.sock"
SWEEPS = {sweep.name: sweep}


@pytest.fixture
def reader(settings: Settings, postgres: Database, redis_client: redis.Redis) -> SnapshotReader:
    postgres.create_tables([UserStatus])
    return SnapshotReader(settings, SWEEPS)


def without_redis(settings: Settings) -> SnapshotReader:
    return SnapshotReader(settings.model_copy(update={"redis_url": NOWHERE, "broker_url": None}), SWEEPS)


def test_unavailable_database_is_named_and_its_workers_stay(reader: SnapshotReader) -> None:
    before = reader.read(None)
    with unavailable_database():
        during = reader.read(before)

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


@pytest.mark.parametrize(("age_s", "is_recent"), [(0, True), (70, False)])
def test_outage_dates_from_the_last_answer_unless_it_is_old(
    settings: Settings, reader: SnapshotReader, age_s: int, is_recent: bool
) -> None:
    before = reader.read(None)
    before.read_at = {server: at - timedelta(seconds=age_s) for server, at in before.read_at.items()}

    during = without_redis(settings).read(before)

    [alert] = [each for each in during.alerts if each.name == "unavailable"]
    assert during.unavailable["Redis"].since == (before.at if is_recent else during.at) == alert.since


@pytest.mark.parametrize(("age_s", "is_known"), [(20, True), (70, False)])
def test_outage_dates_from_the_last_evaluation_by_any_process(
    settings: Settings, reader: SnapshotReader, age_s: int, is_known: bool
) -> None:
    Evaluation.create(began_at=datetime.now(UTC) - timedelta(seconds=age_s))
    evaluated_at = Evaluation.get().began_at

    found = without_redis(settings).read(None)

    assert (found.unavailable["Redis"].since == evaluated_at) is is_known


def test_full_redis_is_the_alert_and_no_process_looks_dead(settings: Settings, reader: SnapshotReader) -> None:
    with embedded.start(postgres=False) as servers, redis.Redis.from_url(servers.redis_url) as client:
        client.config_set("maxmemory", 1)
        full = settings.model_copy(update={"redis_url": servers.redis_url, "broker_url": None})
        Run.create(worker=sweep.name, trigger="schedule", outcome="done", message_id="m", **PAST)
        found = SnapshotReader(full, SWEEPS).read(None)
        client.config_set("maxmemory", 0)
        freed = SnapshotReader(full, SWEEPS).read(found)

    [root] = [each for each in found.alerts if each.cause is None]
    assert (root.name, root.subject, root.severity) == ("no_space", "Redis", "critical")
    assert str(root).startswith("Redis is full: ") and found.has_alerts and not found.processes.known
    assert found.headline.as_text(found.at).startswith("No space: Redis, since ")
    assert [each.name for each in freed.alerts if each.name == "no_space"] == [] and freed.processes.known


@pytest.mark.parametrize(
    ("user", "commands", "why"),
    [
        ("default", ["REPLICAOF 127.0.0.1 1"], "is not a primary, but a replica"),
        ("default", ["CONFIG SET min-replicas-to-write 1"], "Not enough good replicas to write"),
        ("reader", ["ACL SETUSER reader on nopass ~* +@read +client"], "reader has no permissions"),
        ("default", ["SET {}:process_heartbeats x"], "WRONGTYPE"),
    ],
)
@pytest.mark.usefixtures("reader")
def test_redis_that_rejects_writes_is_named_and_no_process_looks_dead(
    settings: Settings, user: str, commands: list[str], why: str
) -> None:
    with embedded.start(postgres=False) as servers, redis.Redis.from_url(servers.redis_url) as client:
        for each in commands:
            client.execute_command(*each.format(settings.namespace).split())
        url = f"unix://{user}:@{servers.redis_url.removeprefix('unix://')}"
        rejecting = settings.model_copy(update={"redis_url": url, "broker_url": None})
        Run.create(worker=sweep.name, trigger="schedule", outcome="done", message_id="m", **PAST)

        found = SnapshotReader(rejecting, SWEEPS).read(None)

    [root] = [each for each in found.alerts if each.cause is None]
    assert (root.name, root.subject, root.severity) == ("unavailable", "Redis", "critical")
    assert str(root).startswith("Redis rejects ") and why in str(root) and not found.processes.known


def test_full_disk_explains_the_failed_runs(reader: SnapshotReader) -> None:
    error = {"outcome": "failed", "reason": "disk full: could not extend file", "error": "could not extend file"}
    first = Run.create(worker=sweep.name, trigger="schedule", **error, **PAST)
    Run.create(worker=sweep.name, trigger="schedule", **error, **PAST)

    found = reader.read(None)

    names = [(each.name, each.cause and each.cause[1]) for each in found.alerts if each.worker == sweep.name]
    [root] = [each for each in found.alerts if each.name == "no_space"]
    assert ("last_run", "no_space") in names and root.since == first.finished_at
    assert str(root) == f"disk full: could not extend file; 1 worker cannot write: {sweep.name}"


def test_alerts_that_a_full_disk_does_not_take_are_shown(
    reader: SnapshotReader, plant: Plant, settings: Settings
) -> None:
    Run.create(worker=sweep.name, trigger="schedule", outcome="failed", reason="gone", error="gone", **PAST)
    plant(
        f"INSERT ON {settings.schema_name}.alerts", "true", "RAISE 'could not extend file' USING ERRCODE = 'disk_full'"
    )

    found = reader.read(None)
    later = reader.read(found)

    first, second = ([each for each in read.alerts if each.name == "no_space"] for read in (found, later))
    assert [str(each) for each in first] == ["disk full: could not extend file"]
    assert first[0].since == found.at == second[0].since
    assert "last_run" in [each.name for each in found.alerts]


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


HOUR = timedelta(hours=1)


@pytest.mark.parametrize(
    ("state", "age", "is_late"),
    [
        ("requested", 24 * HOUR - timedelta(minutes=1), False),
        ("requested", 24 * HOUR + timedelta(minutes=1), True),
        ("running", 25 * HOUR, True),
        ("incomplete", 25 * HOUR, True),
        ("failed", 25 * HOUR, True),
        ("refused", 25 * HOUR, False),
        ("done", 25 * HOUR, False),
    ],
)
def test_erasure_that_is_not_done_in_a_day_is_late(
    reader: SnapshotReader, state: str, age: timedelta, is_late: bool
) -> None:
    _erasure(state, age)

    alerts = [each for each in reader.read(None).alerts if each.name == "erasure_late"]

    assert bool(alerts) is is_late
    assert [each.limit for each in alerts] == [86_400.0] * is_late


def test_late_erasure_is_explained_until_a_later_one_is_done(reader: SnapshotReader) -> None:
    failed = _erasure("failed", 50 * HOUR)
    _erasure("requested", 25 * HOUR)
    _erasure("done", 25 * HOUR, key_hmac="of another subject")

    [alert] = [each for each in reader.read(None).alerts if each.name == "erasure_late"]
    _erasure("done", 0 * HOUR)
    later = reader.read(None)

    assert str(alert) == (
        f"2 erasures are not done after 24 h; erasure {failed} was requested 2.1 d ago and is failed: "
        "housekeeping erasures"
    )
    assert [each for each in later.alerts if each.name == "erasure_late"] == []


def test_late_erasure_stays_while_the_database_is_unavailable(reader: SnapshotReader) -> None:
    _erasure("requested", 25 * HOUR)
    before = reader.read(None)
    with unavailable_database():
        during = reader.read(before)

    assert (during.late_erasures, "erasure_late" in {each.name for each in during.alerts}) == (None, True)


def _erasure(state: str, age: timedelta, key_hmac: str = "5f") -> int:
    now = datetime.now(UTC)  # a long time after the module was imported
    ended = {} if state in ("requested", "running") else {"ended_at": now}
    key = None if ended else ["4711"]
    made = Erasure.create(
        subject="person", key=key, key_hmac=key_hmac, requester="eva", state=state, requested_at=now - age, **ended
    )
    return int(made.id)
