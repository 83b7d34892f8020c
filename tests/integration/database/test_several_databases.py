"""Workers, leases, models and reads with a database of their own, beside the database main."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import dramatiq
import psycopg2
import pytest
import redis
from dramatiq.brokers.redis import RedisBroker
from peewee import AutoField
from psycopg2.extensions import TRANSACTION_STATUS_IDLE

import housekeeping
from housekeeping import BaseModel, Delete, Sweep, UtcDateTimeField
from housekeeping.core.errors import HousekeepingError, LeaseLost, SettingsError
from housekeeping.core.settings import MAIN, Settings, WorkerSettings
from housekeeping.core.telemetry.context import MessageContext, current_message
from housekeeping.database.connection import Database, bind, connect_to, database, handle_of
from housekeeping.leases.lease import ExclusiveLease
from housekeeping.middleware.connections import Connections
from housekeeping.middleware.schedule.middleware import Schedule
from housekeeping.middleware.schedule.tick_recorder import TickRecorder
from housekeeping.sweeps.engine.runner import run_sweep
from housekeeping.sweeps.insight.plan import plan
from housekeeping.sweeps.ledger.history import run_label
from housekeeping.sweeps.ledger.lease_admin import held_leases, release_lease
from housekeeping.sweeps.ledger.models import Lease, Run
from housekeeping.sweeps.ledger.run_list import Position, RunFilter, read_page
from housekeeping.sweeps.registration import register
from housekeeping.sweeps.registry import by_database
from housekeeping.testing import assert_idempotent, assert_survives_kill
from housekeeping.web.application import create_app
from housekeeping.workers import configured_sweeps
from housekeeping.workers.user_status_cleanup.models import UserStatus
from tests.integration.middleware.applications import close_all, installed
from tests.session_settings import NEEDS_SESSION
from tests.two_databases import OtherDatabase

pytestmark = pytest.mark.one_database_only(reason="it configures several databases itself")

CI: Final = "ci"
TTL: Final = timedelta(minutes=10)
STATUSES: Final = "user_status_cleanup.batch"


class Entry(BaseModel):
    id = AutoField()
    due_at = UtcDateTimeField()

    class Meta:
        table_name = "entries"


def entries(name: str, database: str, model: type[Any] = Entry) -> Sweep:
    return Sweep(
        name=name,
        database=database,
        stale=lambda now: model.due_at < now,
        order=(model.id,),
        action=Delete(),
        schedule="* * * * *",
    )


@pytest.fixture
def two(postgres: Database, settings: Settings, other_database: OtherDatabase) -> Iterator[Settings]:
    """Settings with the databases main and ci, both with the library's tables and a table of entries."""
    with other_database.used_as(CI, settings):
        for name in (MAIN, CI):
            with database.using(name):
                database.execute_sql(f"CREATE SCHEMA IF NOT EXISTS {settings.namespace}")
                database.create_tables([Entry])
        yield settings.model_copy(update={"databases": {CI: other_database.url_of(settings)}})
        with database.using(CI):
            database.execute_sql(f"DROP SCHEMA {settings.namespace} CASCADE")
        for model in (Entry, UserStatus):
            bind(model, database)


def add_entry(name: str) -> None:
    with database.using(name):
        Entry.insert(due_at=datetime(2020, 1, 1, tzinfo=UTC)).execute()


def rows(name: str, query: str) -> list[Any]:
    found = database.by_name()[name].execute_sql(query).fetchall()
    return [row[0] for row in found]


def ledger(name: str, settings: Settings) -> list[Any]:
    return rows(name, f"SELECT worker FROM {settings.schema_name}.runs ORDER BY id")


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
            "b has the database 'ci', and a has 'main'; both use the table entries, so they need the same one",
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
    first, second = (ExclusiveLease("k", TTL, database=CI) for _ in range(2))
    assert first.try_obtain() is not None
    write(first, own)
    redis_client.delete(f"{two.namespace}:lease:k")
    assert second.try_obtain() is not None
    with pytest.raises(LeaseLost):
        write(first, own)
    write(second, own)
    own.close()

    assert len(rows(CI, "SELECT id FROM entries")) == 2
    assert not Lease.select().exists()


def test_lease_released_by_hand_is_fenced_off_in_its_database(two: Settings, redis_client: redis.Redis) -> None:
    lease = ExclusiveLease("k", TTL, database=CI)
    assert lease.try_obtain() is not None
    with database.using(CI), database.atomic():
        lease.fence()

    shown = held_leases(redis_client, two.namespace)
    released = release_lease(redis_client, two.namespace, "k")

    assert [(each.key, each.epoch, each.database) for each in shown] == [("k", 1, CI)]
    assert released.as_json()["database"] == CI
    with pytest.raises(LeaseLost), database.using(CI), database.atomic():
        lease.fence()


def test_database_without_the_librarys_tables_hides_no_lease_of_another(
    two: Settings, redis_client: redis.Redis
) -> None:
    lease = ExclusiveLease("nightly", TTL)
    assert lease.try_obtain() is not None
    with database.atomic():
        lease.fence()
    with database.using(CI):
        database.execute_sql(f"DROP TABLE {two.schema_name}.leases")

    [held] = held_leases(redis_client, two.namespace)

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


def test_dashboard_shows_both_databases_and_names_the_unavailable_one(two: Settings, redis_client: redis.Redis) -> None:
    given = two.model_copy(update={"built_in": ()})
    sweeps = configured_sweeps(given, [dataclasses.replace(entries("shop.entries", CI))])
    run_sweep(sweeps["shop.entries"])
    run_sweep(sweeps["housekeeping.old_runs"])

    browser = create_app(given, sweeps, "a-token-of-the-tests", open_to_read=True).test_client()
    front, run = (browser.get(path).get_data(as_text=True) for path in ("/", "/runs/ci:1"))
    there = database.by_name()[CI]
    with database.using(CI):
        database.initialize(connect_to("postgresql://nobody@127.0.0.1:1/nothing"))
    browser = create_app(given, sweeps, "a-token-of-the-tests", open_to_read=True).test_client()
    without, page = browser.get("/").get_data(as_text=True), browser.get("/workers/housekeeping.old_runs")
    with database.using(CI):
        database.initialize(there)

    assert '<td data-label="Database">ci</td>' in front and "/runs/ci:1" in front and "Run ci:1 of" in run
    assert browser.get("/runs/no:1").status_code == 404
    assert "the database &#39;ci&#39; did not answer" in without
    assert 'href="/workers/housekeeping.old_runs"' in without and 'href="/workers/shop.entries"' not in without
    assert page.status_code == 200


def began(name: str, seconds: int) -> str:
    """Write a run of a database that began so many seconds after a full hour; return its label."""
    at = datetime(2026, 1, 1, tzinfo=UTC) + timedelta(seconds=seconds)
    given = {"worker": "shop.entries", "trigger": "schedule", "outcome": "done"}
    with database.using(name):
        run_id: int = Run.insert(**given, started_at=at, heartbeat_at=at, finished_at=at).execute()
    return run_label(run_id, name)


def test_pages_of_runs_go_through_both_databases_in_one_order(two: Settings) -> None:
    labels = [began(name, seconds) for seconds in (0, 1, 1, 2) for name in (MAIN, CI)]
    seen, before = list[str](), None
    for _ in range(4):
        page = read_page([CI, MAIN], lambda now: RunFilter(), limit=2, before=before)
        seen += [each.label for each in page.runs]
        before = Position.of(page.runs[-1])

    assert seen == ["4", "ci:4", "3", "2", "ci:3", "ci:2", "1", "ci:1"] and set(seen) == set(labels)
    assert (page.more, page.unavailable) == (False, [])


def test_unavailable_database_hides_no_run_and_no_bar_of_the_other(two: Settings) -> None:
    began(MAIN, 0)
    with database.using(CI):
        there = database.by_name()[CI]
        database.initialize(connect_to("postgresql://nobody@127.0.0.1:1/nothing"))
    browser = create_app(two, {}, "a-token-of-the-tests", open_to_read=True).test_client()

    pages = {path: browser.get(path).get_data(as_text=True) for path in ("/runs", "/processes", "/charts")}

    with database.using(CI):
        database.initialize(there)
    assert 'href="/runs/1"' in pages["/runs"] and pages["/charts"].count("<figure") == 4
    assert all("the database &#39;ci&#39; did not answer" in page for page in pages.values())
