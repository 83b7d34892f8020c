"""Whether a run that is sent now would start: each server, session and process that decides it, on real ones."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

import psycopg2
import pytest
import redis
from peewee import BigIntegerField, DateTimeField, TextField
from psycopg2.extensions import connection as Connection

from housekeeping import BaseModel, Delete, ExclusiveLease, Guard, Lease, Rows, Settings, Sweep, Throttle
from tests.conftest import Urls
from tests.declarations import changed
from tests.integration.conftest import AddStatuses, Beat, Locked
from tests.integration.middleware.step_worker import close
from tests.integration.roles import connected_as_a_role
from tests.integration.sweeps.engine.sizing import DUE, SMALL
from tests.internals.app import broker_without_database
from tests.internals.cli import print_plan
from tests.internals.core import redis_client as client_of
from tests.internals.core import shared_redis
from tests.internals.database import Database
from tests.internals.embedded import embedded
from tests.internals.insight import Check, Plan, as_json, dry_run, plan
from tests.internals.leases import LeaseRow
from tests.internals.ledger import NOW, SILENCE, Heartbeat, Run

WORKER = replace(changed(SMALL, throttle=Throttle(None, None)), schedule="0 3 * * *")
LEASED = replace(WORKER, lease=Lease("statuses", timedelta(minutes=10)))

pytestmark = pytest.mark.redis_broker_only(reason="the oldest message is known on Redis only")


@pytest.fixture
def stopped_redis(settings: Settings) -> Iterator[Settings]:
    """Return the settings with a Redis server that has been stopped."""
    with embedded.start(postgres=False) as servers:
        url = servers.redis_url
    before = shared_redis.client, shared_redis._namespace
    shared_redis.use(client_of(url), settings.namespace)
    yield settings.model_copy(update={"redis_url": url, "broker_url": None})
    shared_redis.client, shared_redis._namespace = before


def worker_process(busy: int, threads: int = 8) -> Heartbeat:
    queues = [WORKER.queue]
    return Heartbeat(kind="worker", host="a", pid=7, queues=queues, threads=threads, busy=busy, version="1", up_s=60.0)


@pytest.fixture
def processes(beat: Beat) -> None:
    """A worker process with free threads, and a scheduler."""
    beat("worker", worker_process(busy=2))
    beat("scheduler", Heartbeat(kind="scheduler", host="a", pid=8, version="1", up_s=60.0))


def check(found: Plan, name: str) -> Check:
    return next(each for each in found.checks if each.name == name)


def test_run_with_free_threads_and_a_scheduler_would_start(
    add_statuses: AddStatuses, settings: Settings, processes: None
) -> None:
    add_statuses(3, DUE)

    found = plan(WORKER, settings=settings)

    assert (found.in_words, found.reason) == ("a run now would start", None)
    assert check(found, "queue").text == "6 of 8 threads are free; 0 messages are in its queue 'cronjob'"
    assert [each.effect for each in found.checks if each.effect != "none"] == []


def test_no_run_would_start_while_redis_is_stopped(add_statuses: AddStatuses, stopped_redis: Settings) -> None:
    add_statuses(3, DUE)

    free, leased = (plan(each, settings=stopped_redis) for each in (WORKER, LEASED))

    assert (free.in_words, free.stale.rows) == ("a run now would wait (servers_unavailable)", 3)
    assert leased.in_words == "a run now would fail before its first change (lease)"
    assert check(leased, "lease").text == "a run cannot take the lease statuses, and its holder is unknown"
    assert check(leased, "queue").text.startswith("Redis did not answer: ")
    assert check(free, "schedule").effect == "unknown" and "whether a scheduler is alive is unknown" in str(free.checks)
    assert free.unsendable is not None and free.unsendable.startswith("Redis did not answer: ")
    assert (as_json(free)["outcome"], dry_run(LEASED, settings=stopped_redis).outcome) == ("waits", "failed")


def test_blocker_of_a_locked_table_is_named_without_its_literals(
    add_statuses: AddStatuses,
    settings: Settings,
    urls: Urls,
    processes: None,
    capsys: pytest.CaptureFixture[str],
) -> None:
    add_statuses(3, DUE)
    with psycopg2.connect(urls.database, application_name="nightly backup") as blocker, blocker.cursor() as cursor:
        cursor.execute(f"LOCK TABLE {settings.namespace}.user_statuses")
        cursor.execute("SELECT\n1 AS one, 'hunter2'")
        found, dry = plan(WORKER, settings=settings), dry_run(WORKER)
        session = blocker.info.backend_pid
    blocker.close()

    print_plan(found)
    assert capsys.readouterr().out.splitlines()[1].split() == ["user_statuses", *["unknown"] * 3, "-", "-"]
    text = check(found, "locks").text
    assert (found.outcome, found.reason, str(found.stale)) == ("waits", "locked", "unknown")
    assert text.startswith(f'"user_statuses" is locked by process {session} of PostgreSQL (nightly ')
    assert "idle in transaction: its transaction is open for" in text and "SELECT 1 AS one, …" in text
    assert text.partition(". To end it: ")[2].startswith(f"SELECT pg_terminate_backend({session}). A batch waits")
    assert "hunter2" not in str(as_json(found))
    assert "the rows could not be counted: canceling statement due to lock timeout" in found.warnings
    assert (dry.outcome, dry.reason) == ("failed", "locked")


def test_blocker_of_a_table_with_an_archive_is_named(postgres: Database, locked: Locked) -> None:
    postgres.execute_sql("CREATE TABLE notes (id bigint PRIMARY KEY, at timestamptz, grace text DEFAULT '0')")
    postgres.execute_sql("CREATE TABLE old_notes (LIKE notes INCLUDING INDEXES)")
    postgres.execute_sql("ALTER TABLE old_notes ADD archived_at timestamptz, ADD archived_by_run bigint")

    with locked("ALTER TABLE notes ADD COLUMN note text"):
        found = plan(notes(Delete(archive_to="old_notes")))

    assert (found.outcome, found.reason) == ("waits", "locked")
    assert "ALTER TABLE notes ADD COLUMN note text" in check(found, "locks").text


def notes(action: Delete) -> Sweep:
    """Return a sweep of the table notes."""

    class Note(BaseModel):
        id = BigIntegerField(primary_key=True)
        at = DateTimeField()
        grace = TextField()

        class Meta:
            table_name = "notes"

    def stale(row: Any, now: datetime) -> Any:
        return (row.at < now) & (row.grace.cast("integer") == 0)

    return Sweep("test.notes", Rows(Note, stale=stale, order="at", action=action), guard=Guard(first_run=False))


def test_row_for_which_the_predicate_fails_is_named(postgres: Database, settings: Settings, processes: None) -> None:
    postgres.execute_sql("CREATE TABLE notes (id bigint PRIMARY KEY, at timestamptz, grace text DEFAULT '0')")
    postgres.execute_sql("INSERT INTO notes SELECT n, '2020-01-01', 0 FROM generate_series(1, 3000) AS n")
    postgres.execute_sql("UPDATE notes SET grace = 'a week' WHERE id = 2345")

    found = plan(notes(Delete()), settings=settings)

    assert (found.in_words, found.outcome) == (
        "a run now would fail when it reaches the row for which its predicate fails",
        "failed",
    )
    assert check(found, "rows").text.endswith(
        'fails for the row id 2345: invalid input syntax for type integer: "a week"'
    )
    assert found.backlog_forecast is not None
    assert found.backlog_forecast.text == "the stale rows cannot be counted; when they will be done is unknown"


@pytest.mark.direct_only(reason="the role is set in the session")
def test_blocker_is_named_to_a_role_that_sees_no_statements(
    add_statuses: AddStatuses, postgres: Database, settings: Settings, admin: Connection, locked: Locked
) -> None:
    add_statuses(3, DUE)
    rights = {"user_statuses": ("SELECT", "DELETE")}

    with connected_as_a_role(postgres, settings, admin, rights), locked("LOCK TABLE user_statuses IN SHARE MODE"):
        found = plan(WORKER)

    assert (found.outcome, found.reason, found.stale.rows) == ("waits", "locked", 3)
    assert "whose statement this role may not see" in check(found, "locks").text


def test_session_for_which_a_batch_waits_is_named(
    add_statuses: AddStatuses, settings: Settings, urls: Urls, admin: Connection, locked: Locked
) -> None:
    add_statuses(1, DUE)
    batch = psycopg2.connect(urls.database, application_name="housekeeping")
    with locked("SELECT * FROM user_statuses FOR UPDATE"):
        statement = f"DELETE FROM {settings.namespace}.user_statuses"
        waiting = threading.Thread(target=batch.cursor().execute, args=(statement,))
        waiting.start()
        await_lock(admin, batch.info.backend_pid)
        found = plan(WORKER)
    waiting.join()
    batch.close()

    assert (found.outcome, found.reason) == ("waits", "locked")
    assert "SELECT * FROM user_statuses FOR UPDATE" in check(found, "locks").text


def await_lock(admin: Connection, pid: int) -> None:
    deadline = time.monotonic() + 30
    with admin.cursor() as cursor:
        while time.monotonic() < deadline:
            cursor.execute("SELECT FROM pg_locks WHERE pid = %s AND NOT granted", (pid,))
            if cursor.fetchone() is not None:
                return
    raise AssertionError("the statement does not wait")


def test_process_that_holds_the_lease_is_named_with_the_command(
    add_statuses: AddStatuses, settings: Settings, processes: None, redis_client: redis.Redis
) -> None:
    with ExclusiveLease("statuses", timedelta(minutes=10), worker="reports"):
        found = plan(LEASED, settings=settings)
        process = next(each.text for each in found.checks if each.name == "lease").split(" ")[2]

    text = check(found, "lease").text
    assert (found.outcome, found.reason) == ("skipped", "lease_held")
    assert text.startswith(f"reports on {process} holds the lease statuses for ") and ":" in process
    assert text.endswith("if it hangs: housekeeping leases release statuses")


def test_lease_of_a_dead_run_keeps_no_run_from_starting(statuses: None, redis_client: redis.Redis) -> None:
    lease = ExclusiveLease("statuses", timedelta(minutes=10), worker=LEASED.name)
    token = lease.try_obtain()
    LeaseRow.insert(key="statuses", epoch=7, holder=token, used_at=NOW).execute()
    silent = NOW - 2 * SILENCE
    Run.insert(worker=LEASED.name, trigger="cli", epoch=7, started_at=silent, heartbeat_at=silent).execute()

    found = plan(LEASED)

    assert (found.outcome, check(found, "lease").effect) == ("done", "none")
    assert "is dead; a run takes it over" in check(found, "lease").text


@pytest.fixture
def send(settings: Settings, redis_client: redis.Redis) -> Iterator[Callable[[], None]]:
    broker: Any = broker_without_database(settings, {WORKER.name: WORKER})
    yield lambda: broker.enqueue(broker.get_actor(WORKER.name).message())
    close(broker)


def test_saturated_queue_is_named_with_its_oldest_message(
    statuses: None, settings: Settings, beat: Beat, send: Callable[[], None]
) -> None:
    beat("worker", worker_process(busy=8))
    send()

    found = plan(WORKER, settings=settings)

    assert (found.in_words, found.reason) == ("a run now would wait (saturated)", "saturated")
    assert check(found, "queue").text.startswith(
        "0 of 8 threads are free; 1 message is in its queue 'cronjob', the oldest waits for "
    )


@pytest.mark.parametrize("body", [b"\xff", b"[]", b"{}", b'{"message_timestamp": "x", "options": {}}', b"[" * 100_000])
def test_age_of_an_unreadable_message_is_left_out(
    statuses: None, settings: Settings, processes: None, redis_client: redis.Redis, body: bytes
) -> None:
    queue = f"{settings.namespace}:broker:{WORKER.queue}"
    redis_client.rpush(queue, "x")
    redis_client.hset(f"{queue}.msgs", "x", body)

    assert check(plan(WORKER, settings=settings), "queue").text.endswith("; 1 message is in its queue 'cronjob'")


def test_queue_without_a_worker_and_a_dead_scheduler_are_named(statuses: None, settings: Settings, beat: Beat) -> None:
    beat("worker", worker_process(busy=0), timedelta(minutes=5))
    beat("scheduler", Heartbeat(kind="scheduler", host="a", pid=8, version="1", up_s=60.0), timedelta(minutes=5))

    found = plan(WORKER, settings=settings)

    assert (found.outcome, found.reason) == ("waits", "no_worker")
    assert "but no worker serves the queue 'cronjob' since" in check(found, "queue").text
    schedule = check(found, "schedule")
    assert schedule.effect == "alerts" and "but no scheduler is alive since" in schedule.text


def test_without_redis_no_queue_is_named_before_the_first_process(
    statuses: None, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_redis, "client", None)  # an earlier test may have set one

    found = plan(WORKER, settings=settings.model_copy(update={"redis_url": None}))

    assert check(found, "queue").text.startswith("no worker serves the queue 'cronjob'")


def test_run_without_a_column_of_the_ledger_would_fail(statuses: None, settings: Settings, processes: None) -> None:
    def first_run(sweep: Sweep) -> Sweep:
        return changed(sweep, name="shop.statuses", first_run=True)

    Run.raw(f"ALTER TABLE {Run._meta.schema}.runs RENAME COLUMN counts TO elsewhere").execute()

    found = plan(first_run(WORKER), settings=settings)

    assert found.in_words == "a run now would fail before its first change (column t1.counts does not exist)"
