"""Alerts in the ledger: their beginnings, acknowledgments and ends, whoever reads them and whatever fails meanwhile."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from threading import Barrier
from typing import Any, Final

import pytest
import redis
from dramatiq import Worker

from housekeeping import Settings, install
from housekeeping.workers.user_status_cleanup.models import UserStatus
from tests.acceptance.processes import eventually
from tests.integration.conftest import Beat
from tests.integration.middleware.step_worker import close
from tests.internals.brokers import message_broker
from tests.internals.core import MAIN
from tests.internals.database import Database, database
from tests.internals.engine import send
from tests.internals.insight import Alert
from tests.internals.ledger import (
    AlertRow,
    Heartbeat,
    Run,
    acknowledge,
    claim_evaluation,
    processes,
    reconcile,
)
from tests.internals.middleware import observe
from tests.internals.web import SnapshotReader
from tests.internals.workers import status_sweep as sweep
from tests.session_settings import set_in_session

NOWHERE: Final = "unix:///nowhere/redis.sock"
MINUTE: Final = timedelta(minutes=1)
ALERT: Final = Alert("backlog", "too many", worker="shop.carts")


@pytest.fixture
def reader(settings: Settings, postgres: Database, redis_client: redis.Redis) -> SnapshotReader:
    postgres.create_tables([UserStatus])
    return SnapshotReader(settings, {sweep.name: sweep})


def ended(outcome: str = "failed", minutes_ago: float = 0.0, number: int = 1) -> None:
    at = datetime.now(UTC) - minutes_ago * MINUTE
    times = dict.fromkeys(("started_at", "heartbeat_at", "finished_at"), at)
    row = {"worker": sweep.name, "trigger": "schedule", "outcome": outcome, "reason": "gone", **times}
    Run.insert_many([row] * number).execute()


def alert_of(reader: SnapshotReader, name: str = "last_run") -> Alert:
    [alert] = [each for each in reader.read().alerts if each.name == name]
    return alert


def rows(name: str = "last_run") -> list[Any]:
    return list(AlertRow.select().where(AlertRow.name == name).order_by(AlertRow.id))


def read(*found: Alert, at: datetime | None = None, judged: bool = True) -> list[Alert]:
    with database.using(MAIN):
        alerts, error = reconcile(found, lambda _: judged, at or datetime.now(UTC))
    assert error is None
    return alerts


def lives() -> list[bool]:
    """Return for each stored beginning of `ALERT`, oldest first, whether it has not ended."""
    return [row.ended_at is None for row in rows("backlog")]


def test_beginning_survives_sixty_runs_a_lost_run_and_a_restart(reader: SnapshotReader, settings: Settings) -> None:
    ended(minutes_ago=90)
    first = alert_of(reader)
    ended(number=60)
    ended("lost")

    after = alert_of(SnapshotReader(settings, {sweep.name: sweep}))

    assert first.since is not None and after.since == first.since
    assert abs(first.since - datetime.now(UTC) + 90 * MINUTE) < MINUTE
    [row] = rows()
    assert (row.worker, row.severity, row.ended_at) == (sweep.name, "warning", None)


def test_skipped_ticks_end_no_alert(reader: SnapshotReader) -> None:
    ended()
    first = alert_of(reader)
    ended("skipped", number=60)
    ended("missed")

    assert alert_of(reader).alert_id == first.alert_id


def test_acknowledgment_holds_until_the_end_and_not_for_the_next_alert(reader: SnapshotReader) -> None:
    ended()
    [known] = acknowledge([alert_of(reader)], "kim")
    is_known = AlertRow.acknowledged_at.is_null(False)
    AlertRow.update(acknowledged_at=datetime.now(UTC) - timedelta(days=9)).where(is_known).execute()
    still = alert_of(reader).acknowledged
    ended("done")
    during = [alert.name for alert in reader.read().alerts if alert.worker]
    ended()
    again = alert_of(reader)

    assert still is not None and still.user == "kim"
    assert during == [] and again.acknowledged is None and again.alert_id != known.alert_id
    assert [row.ended_at is None for row in rows()] == [False, True]


def test_ended_alert_cannot_be_acknowledged(postgres: Database) -> None:
    [alert] = read(ALERT)
    read()

    assert acknowledge([alert], "kim") == []


def test_event_after_the_acknowledgment_begins_the_alert_again(postgres: Database) -> None:
    [first] = read(ALERT)
    acknowledge([first], "kim")
    renewed = replace(ALERT, renewed_at=datetime.now(UTC) + MINUTE)

    [ended_now] = read(renewed, at=datetime.now(UTC) + MINUTE)
    [again] = read(renewed, at=datetime.now(UTC) + 2 * MINUTE)

    assert ended_now.acknowledged is None and again.acknowledged is None
    assert again.alert_id != first.alert_id and lives() == [False, True]


def test_read_only_reader_shows_alerts_and_stores_nothing(reader: SnapshotReader, postgres: Database) -> None:
    ended()
    stored = alert_of(reader)
    Run.update(counts={"failed": 3}).execute()
    set_in_session(postgres, "default_transaction_read_only = on")

    found = {alert.name: alert for alert in reader.read().alerts}

    assert found["last_run"].since == stored.since
    assert found["failed_rows"].alert_id is None
    set_in_session(postgres, "default_transaction_read_only = off")
    assert rows("failed_rows") == []


def test_alerts_that_redis_tells_stay_while_it_is_away(reader: SnapshotReader, settings: Settings) -> None:
    ended("done")
    Run.update(host="a", pid=7).execute()
    before = alert_of(reader, "no_worker")
    away = settings.model_copy(update={"redis_url": NOWHERE, "broker_url": None})

    during = {alert.name: alert for alert in SnapshotReader(away, {sweep.name: sweep}).read().alerts}
    later = alert_of(SnapshotReader(away, {sweep.name: sweep}), "unavailable")
    after = reader.read()

    assert during["no_worker"].since == before.since
    assert (during["unavailable"].subject, during["unavailable"].severity) == ("Redis", "critical")
    assert later.since == during["unavailable"].since
    assert "unavailable" not in [alert.name for alert in after.alerts] and "no_worker" in [a.name for a in after.alerts]


def test_two_readers_at_once_begin_and_end_an_alert_once(postgres: Database) -> None:
    barrier = Barrier(2, timeout=30)
    at = datetime.now(UTC)

    def reads(*found: Alert, at: datetime) -> None:
        barrier.wait()
        try:
            read(*found, at=at)
        finally:
            postgres.close()

    with ThreadPoolExecutor(2) as threads:
        for each in [threads.submit(reads, ALERT, at=at) for _ in range(2)]:
            each.result()
        began = lives()
        for each in [threads.submit(reads, at=at + MINUTE) for _ in range(2)]:
            each.result()

    assert (began, lives()) == ([True], [False])


def test_late_reader_neither_ends_nor_begins_what_a_later_one_has_seen(postgres: Database) -> None:
    now = datetime.now(UTC)
    read(ALERT, at=now)
    read(at=now - MINUTE)
    kept = lives()
    read(at=now + MINUTE)
    read(ALERT, at=now - MINUTE)

    assert (kept, lives()) == ([True], [False])


def test_change_of_a_reader_killed_before_its_commit_is_stored_by_the_next(postgres: Database) -> None:
    class Killed(Exception):
        pass

    with pytest.raises(Killed), database.using(MAIN), database.atomic():
        read(ALERT)
        raise Killed

    lost = lives()
    [alert] = read(ALERT)

    assert (lost, lives()) == ([], [True]) and alert.alert_id is not None


def test_alert_that_was_not_judged_stays(postgres: Database) -> None:
    [first] = read(ALERT)

    kept = read(judged=False, at=datetime.now(UTC) + MINUTE)

    assert [alert.alert_id for alert in kept] == [first.alert_id] and lives() == [True]


def test_unchanged_alerts_are_only_read(postgres: Database, statements: list[str]) -> None:
    read(ALERT)
    statements.clear()

    read(ALERT)

    assert len(statements) == 1 and statements[0].startswith("SELECT")


def test_text_is_stored_again_after_half_a_minute(postgres: Database) -> None:
    now = datetime.now(UTC)
    read(ALERT, at=now)
    read(replace(ALERT, text="more", value=7), at=now + MINUTE)

    [row] = rows("backlog")
    assert (row.text, row.value, row.seen_at) == ("more", 7, now + MINUTE)


def test_one_process_of_the_installation_evaluates_every_half_minute(postgres: Database) -> None:
    first = [claim_evaluation() for _ in range(3)]
    postgres.execute_sql(f"UPDATE \"{AlertRow._meta.schema}\".evaluations SET began_at = began_at - interval '31 s'")
    again = [claim_evaluation() for _ in range(2)]
    postgres.execute_sql(f"UPDATE \"{AlertRow._meta.schema}\".evaluations SET began_at = began_at + interval '1 day'")

    assert first == [True, False, False] and again == [True, False]
    assert claim_evaluation(), "the database's clock was set back"


def test_alert_of_a_queue_ends_once_a_worker_serves_it(reader: SnapshotReader, beat: Beat) -> None:
    ended("done")
    worker = Heartbeat(kind="worker", host="one", pid=1, version="0", up_s=60.0, queues=[sweep.queue], threads=1)
    beat("one", worker, timedelta(minutes=5))
    assert alert_of(reader, "no_worker").subject == sweep.queue

    beat("one", worker)

    assert "no_worker" not in {each.name for each in reader.read().alerts}


def test_dead_letters_are_an_alert_that_the_next_one_renews(
    reader: SnapshotReader, settings: Settings, redis_client: redis.Redis
) -> None:
    def dies(number: int, ago: timedelta) -> None:
        key = f"{settings.namespace}:broker:{sweep.queue}.XQ"
        redis_client.zadd(key, {f"m{number}": (datetime.now(UTC) - ago).timestamp() * 1000})
        redis_client.hset(f"{key}.msgs", f"m{number}", json.dumps({"actor_name": "shop.mails"}))

    dies(1, 10 * MINUTE)
    first = alert_of(reader, "dead_letters")
    acknowledge([first], "kim")
    known = alert_of(reader, "dead_letters")
    dies(2, -MINUTE)
    reader.read()
    again = alert_of(reader, "dead_letters")
    redis_client.delete(f"{settings.namespace}:broker:{sweep.queue}.XQ")

    assert first.text == f"1 dead letter in queue '{sweep.queue}'; the newest are of shop.mails (1)"
    assert first.since is not None and abs(first.since - datetime.now(UTC) + 10 * MINUTE) < MINUTE
    assert known.acknowledged is not None and again.acknowledged is None
    assert again.text.startswith("2 dead letters") and again.alert_id != first.alert_id
    assert "dead_letters" not in [alert.name for alert in reader.read().alerts]


def test_redis_away_is_the_root_of_what_it_explains(reader: SnapshotReader, settings: Settings) -> None:
    ended("done", minutes_ago=60)
    away = settings.model_copy(update={"redis_url": NOWHERE, "broker_url": None})

    found = SnapshotReader(away, {sweep.name: sweep}).read()

    assert found.has_alerts and found.headline.text == "Unavailable: Redis"
    assert [(alert.name, alert.cause and alert.cause[1:]) for alert in found.alerts] == [
        ("unavailable", None),
        ("overdue", ("unavailable", "Redis")),
    ]
    assert [alert.cause for alert in found.statuses[sweep.name].alarms] == [("", "unavailable", "Redis")]


def test_process_that_nobody_looks_at_stores_alerts(
    reader: SnapshotReader, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(observe, "WATCHED", timedelta(seconds=0.05))
    monkeypatch.setattr(processes, "INTERVAL", timedelta(seconds=0.05))
    ended()
    broker = message_broker(settings)
    install(broker, settings, workers=False, sweeps=[sweep])
    worker = Worker(broker, worker_timeout=20, worker_threads=1)
    broker.emit_after("process_boot")
    worker.start()
    try:
        eventually(lambda: rows() != [])
    finally:
        worker.stop()
        close(broker)
        send.forget_all()

    assert [row.worker for row in rows()] == [sweep.name]
