"""Workers, leases, models and reads with a database of their own, beside the database main."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any, Final

import dramatiq
import psycopg2
import pytest
import redis
from dramatiq.brokers.redis import RedisBroker
from psycopg2.extensions import TRANSACTION_STATUS_IDLE

import housekeeping
from housekeeping import ExclusiveLease, Settings, Sweep
from housekeeping.testing.assertions import assert_idempotent, assert_survives_kill
from housekeeping.workers.user_status_cleanup.models import UserStatus
from tests.integration.middleware.applications import close_all, installed
from tests.integration.several_databases import CI, Entry, add_entry, entries, ledger, rows
from tests.integration.several_databases import two as two
from tests.internals.core import (
    MAIN,
    HousekeepingError,
    LeaseLost,
    MessageContext,
    SettingsError,
    WorkerSettings,
    current_message,
)
from tests.internals.database import connect_to, database, handle_of
from tests.internals.engine import by_database, register, run_sweep
from tests.internals.insight import as_json, plan
from tests.internals.leases import LeaseRow, RedisLeaseStore
from tests.internals.ledger import Run, held_leases, release_lease
from tests.internals.middleware import Connections, Schedule, TickRecorder
from tests.internals.workers import configured_sweeps
from tests.session_settings import NEEDS_SESSION

pytestmark = pytest.mark.one_database_only(reason="it configures several databases itself")
TTL: Final = timedelta(minutes=10)
STATUSES: Final = "user_status_cleanup.batch"


def test_batch_and_ledger_row_are_in_the_database_of_the_sweep(two: Settings) -> None:
    add_entry(MAIN)
    add_entry(CI)
    add_entry(CI)

    planned = plan(entries("shop.entries", CI))
    result = run_sweep(entries("shop.entries", CI))

    assert (planned.stale.rows, result.outcome, result.counts["deleted_rows"]) == (2, "done", 2)
    assert (rows(MAIN, "SELECT id FROM entries"), rows(CI, "SELECT id FROM entries")) == ([1], [])
    assert (ledger(MAIN, two), ledger(CI, two)) == ([], ["shop.entries"])
    assert database.selected == MAIN


def test_models_are_bound_to_the_database_of_their_workers(two: Settings) -> None:
    given = two.model_copy(update={"workers": {STATUSES: WorkerSettings(database=CI)}})
    with database.using(CI):
        database.create_tables([UserStatus])

    sweeps = configured_sweeps(given, [entries("shop.entries", MAIN)])
    UserStatus.create(user_id=1, clear_status_at=datetime(2020, 1, 1, tzinfo=UTC))
    with database.using(CI):
        # For example in an event handler of a run
        Entry.create(due_at=datetime(2020, 1, 1, tzinfo=UTC))
    try:
        assert rows(CI, "SELECT user_id FROM user_statuses") == [1]
        assert (rows(MAIN, "SELECT id FROM entries"), rows(CI, "SELECT id FROM entries")) == ([1], [])
        assert {name for name, each in sweeps.items() if each.database == CI} == {
            STATUSES,
            "housekeeping.old_runs.ci",
            "housekeeping.outbox.ci",
        }
        assert [each.name for each in by_database(sweeps.values())[CI]][0] == STATUSES
    finally:
        configured_sweeps(two.model_copy(update={"databases": {}}), [entries("shop.entries", MAIN)])
    assert vars(UserStatus)["_meta"].database is database


@pytest.mark.parametrize(
    ("sweeps", "problem"),
    [
        (
            [entries("a", MAIN), entries("b", CI)],
            "b has the database 'ci', and a has the database 'main'; both use the table entries, so they need the "
            "same one",
        ),
        ([entries("a", "c")], "a has the database 'c'; the databases are main, ci (HOUSEKEEPING_DATABASES)"),
    ],
)
def test_impossible_databases_are_rejected_in_one_line(two: Settings, sweeps: list[Sweep], problem: str) -> None:
    with pytest.raises(SettingsError) as refusal:
        configured_sweeps(two, sweeps)

    assert str(refusal.value) == problem


def test_maintenance_of_a_database_cannot_move_to_another(two: Settings) -> None:
    given = two.model_copy(update={"workers": {"housekeeping.old_runs": WorkerSettings(database=CI)}})

    with pytest.raises(SettingsError, match="each database has a worker of its own for this"):
        configured_sweeps(given)


def test_old_runs_of_each_database_are_deleted(two: Settings) -> None:
    old = datetime.now(UTC) - timedelta(days=40)
    for name in (MAIN, CI):
        with database.using(name):
            Run.insert(
                worker="x", trigger="cli", started_at=old, heartbeat_at=old, finished_at=old, outcome="done"
            ).execute()

    run_sweep(configured_sweeps(two)["housekeeping.old_runs.ci"])

    assert (ledger(MAIN, two), ledger(CI, two)) == (["x"], ["housekeeping.old_runs.ci"])


@NEEDS_SESSION
def test_assertions_on_a_sweep_compare_the_tables_of_its_database(two: Settings, redis_client: redis.Redis) -> None:
    add_entry(CI)

    assert_idempotent(entries("shop.entries", CI))
    add_entry(CI)
    points = assert_survives_kill(entries("shop.entries", CI))

    assert any("entries" in point for point in points)
    assert rows(CI, "SELECT count(*) FROM entries") == [1]


def test_lease_is_fenced_in_its_database_with_the_applications_connection(
    two: Settings, redis_client: redis.Redis
) -> None:
    def write(lease: ExclusiveLease, connection: Any) -> None:
        with connection, connection.cursor() as cursor:
            cursor.execute("INSERT INTO entries (due_at) VALUES (now())")
            lease.fence(connection)

    own = psycopg2.connect(two.databases[CI])
    first, second = (ExclusiveLease("k", TTL, fenced=True, database=CI) for _ in range(2))
    assert first.try_obtain() is not None
    write(first, own)
    redis_client.delete(f"{two.namespace}:lease:k")
    assert second.try_obtain() is not None
    with pytest.raises(LeaseLost):
        write(first, own)
    write(second, own)
    own.close()

    assert len(rows(CI, "SELECT id FROM entries")) == 2
    assert not LeaseRow.select().exists()


def test_lease_released_by_hand_is_fenced_off_in_its_database(two: Settings, redis_client: redis.Redis) -> None:
    lease = ExclusiveLease("k", TTL, fenced=True, database=CI)
    assert lease.try_obtain() is not None
    with database.using(CI), database.atomic():
        lease.fence()

    shown = held_leases(RedisLeaseStore(redis_client, two.namespace))
    released = release_lease(RedisLeaseStore(redis_client, two.namespace), "k")

    assert [(each.key, each.epoch, each.database) for each in shown] == [("k", 1, CI)]
    assert as_json(released)["database"] == CI
    with pytest.raises(LeaseLost), database.using(CI), database.atomic():
        lease.fence()


def test_database_without_the_librarys_tables_hides_no_lease_of_another(
    two: Settings, redis_client: redis.Redis
) -> None:
    lease = ExclusiveLease("nightly", TTL, fenced=True)
    assert lease.try_obtain() is not None
    with database.atomic():
        lease.fence()
    with database.using(CI):
        database.execute_sql(f"DROP TABLE {two.schema_name}.leases")

    [held] = held_leases(RedisLeaseStore(redis_client, two.namespace))

    assert (held.key, held.epoch) == ("nightly", 1)


def test_lease_is_not_acquired_in_a_transaction_of_any_database(two: Settings, redis_client: redis.Redis) -> None:
    with (
        handle_of(CI).atomic(),
        pytest.raises(HousekeepingError, match="inside an open database transaction"),
    ):
        handle_of(CI).execute_sql("SELECT 1")
        ExclusiveLease("k", TTL).try_obtain()


def test_ticks_are_recorded_in_the_database_of_their_worker(two: Settings, redis_client: redis.Redis) -> None:
    broker = installed(two)
    plain = dramatiq.actor(broker=broker, actor_name="plain", schedule="* * * * *")(lambda: None)
    recorder = _recorder_of(broker)
    tick = datetime(2026, 1, 1, tzinfo=UTC)
    register(broker, entries("shop.entries", CI))

    recorder.record("shop.entries", "skipped", "deduplicated", tick, "m1")
    recorder.record(plain.actor_name, "done", None, tick, "m2")
    close_all()

    assert (ledger(MAIN, two), ledger(CI, two)) == (["plain"], ["shop.entries"])


def test_unwritten_ticks_of_an_unavailable_database_delay_no_others(two: Settings, redis_client: redis.Redis) -> None:
    broker = installed(two)
    register(broker, entries("shop.entries", CI))
    recorder = _recorder_of(broker)
    tick, there = datetime(2026, 1, 1, tzinfo=UTC), database.by_name()
    away = connect_to("postgresql://nobody@127.0.0.1:1/nothing")

    for name in there:
        with database.using(name):
            database.initialize(away)
    recorder.record("shop.entries", "skipped", "deduplicated", tick, "m1")
    recorder.record("plain", "done", None, tick, "m2")
    database.initialize(there[MAIN])
    recorder.flush({})
    only_main = ledger(MAIN, two)
    with database.using(CI):
        database.initialize(there[CI])
    recorder.flush({})
    close_all()

    assert (only_main, ledger(MAIN, two), ledger(CI, two)) == (["plain"], ["plain"], ["shop.entries"])


def _recorder_of(broker: RedisBroker) -> TickRecorder:
    return next(each._recorder for each in broker.middleware if isinstance(each, Schedule))


def test_message_leaves_no_open_transaction_on_any_connection(two: Settings, redis_client: redis.Redis) -> None:
    broker = installed(two)
    connections = next(each for each in broker.middleware if isinstance(each, Connections))
    other = database.by_name()[CI]
    other.begin()
    other.execute_sql("SELECT 1")

    connections.after_process_message(broker, dramatiq.MessageProxy(_message()))
    close_all()

    assert other.is_closed() or other.connection().info.transaction_status == TRANSACTION_STATUS_IDLE


def _message() -> dramatiq.Message[Any]:
    return dramatiq.Message(queue_name="default", actor_name="plain", args=(), kwargs={}, options={})


def test_read_database_names_a_database(two: Settings) -> None:
    token = current_message.set(MessageContext("m"))
    try:
        assert housekeeping.read_database(CI) is database.by_name()[CI]
        assert housekeeping.read_database() is database.by_name()[MAIN]
        with pytest.raises(SettingsError, match="there is no database 'c'; the databases are main, ci"):
            housekeeping.read_database("c")
    finally:
        current_message.reset(token)
