from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from datetime import UTC, datetime, timedelta, timezone
from functools import partial
from typing import Any

import psycopg2
import pytest
from dramatiq.middleware import Shutdown
from peewee import InterfaceError, OperationalError, PostgresqlDatabase, fn
from psycopg2.extensions import TRANSACTION_STATUS_IDLE, make_dsn
from psycopg2.extensions import connection as Connection

from housekeeping import Settings
from housekeeping.workers.user_status_cleanup.models import UserStatus
from tests.faults import at_step, once
from tests.internals.core import DatabaseUnavailable, LostLease, SettingsError
from tests.internals.database import Database, PreparedStatements, connect_to, database, translate_postgres_errors
from tests.internals.embedded import embedded
from tests.session_settings import set_in_session

_PID = "SELECT pg_backend_pid()"
PATIENCE_S = 20


@pytest.fixture(scope="module")
def servers() -> Iterator[embedded.Servers]:
    """A PostgreSQL of this module's own, to be restarted."""
    with embedded.start(redis=False) as servers:
        yield servers


@pytest.fixture
def restartable(servers: embedded.Servers) -> Iterator[Database]:
    """A handle on that server, reached as the library's code reaches its own: by the proxy."""
    proxy: Any = database
    before = proxy.obj
    proxy.initialize(connect_to(servers.database_url))
    proxy.execute_sql("CREATE TABLE IF NOT EXISTS notes (text text)")
    proxy.execute_sql("TRUNCATE notes")
    yield proxy
    proxy.close()
    proxy.initialize(before)


def _notes(connected: Database) -> list[str]:
    return [text for (text,) in connected.execute_sql("SELECT text FROM notes ORDER BY text").fetchall()]


def test_after_a_restart_of_the_server_the_next_read_works(servers: embedded.Servers, restartable: Database) -> None:
    before = restartable.execute_sql(_PID).fetchone()

    servers.restart("postgres")

    assert restartable.execute_sql(_PID).fetchone() != before


@pytest.mark.parametrize("transaction", [lambda _: nullcontext(), Database.atomic], ids=["write", "transaction"])
def test_after_a_restart_of_the_server_the_next_write_works(
    servers: embedded.Servers, restartable: Database, transaction: Callable[[Database], AbstractContextManager[Any]]
) -> None:
    servers.restart("postgres")

    with transaction(restartable):
        restartable.execute_sql("INSERT INTO notes VALUES ('a')")

    assert _notes(restartable) == ["a"]


@pytest.mark.parametrize("ending", ["restart", "kill"])
def test_lost_server_fails_its_transaction_and_the_next_one_works(
    servers: embedded.Servers, restartable: Database, ending: str
) -> None:
    with pytest.raises((OperationalError, InterfaceError)), restartable.atomic():
        restartable.execute_sql("INSERT INTO notes VALUES ('lost')")
        getattr(servers, ending)("postgres")
        servers.start("postgres")
        restartable.execute_sql("INSERT INTO notes VALUES ('never')")

    with restartable.atomic():
        restartable.execute_sql("INSERT INTO notes VALUES ('kept')")
    assert _notes(restartable) == ["kept"]


def _raise(error: type[BaseException]) -> None:
    raise error


@pytest.mark.parametrize("interrupt", [LostLease, Shutdown])
@pytest.mark.parametrize("where", ["commit", "rollback"])
def test_interrupt_at_the_end_of_a_transaction_leaves_none_open(
    restartable: Database, interrupt: type[BaseException], where: str
) -> None:
    interrupted = at_step(PostgresqlDatabase, where, "before", once(partial(_raise, interrupt)))
    with interrupted, pytest.raises(interrupt), restartable.atomic():
        restartable.execute_sql("INSERT INTO notes VALUES ('stopped')")
        if where == "rollback":
            raise ValueError("so it is rolled back")

    with restartable.atomic():
        restartable.execute_sql("INSERT INTO notes VALUES ('next')")
    assert _notes(restartable) == ["next"]


@pytest.mark.parametrize("interrupt", [LostLease, Shutdown])
def test_an_interrupt_where_a_transaction_begins_leaves_none_open(
    restartable: Database, interrupt: type[BaseException]
) -> None:
    interrupted = at_step(Database, "begin", "after", partial(_raise, interrupt))
    with interrupted, pytest.raises(interrupt), restartable.atomic():
        pass

    assert not restartable.in_transaction()
    assert restartable.connection().info.transaction_status == TRANSACTION_STATUS_IDLE


def test_interrupted_commit_releases_its_locks_at_once(restartable: Database, servers: embedded.Servers) -> None:
    restartable.execute_sql("INSERT INTO notes VALUES ('locked')")
    interrupted = at_step(PostgresqlDatabase, "commit", "before", partial(_raise, LostLease))
    with interrupted, pytest.raises(LostLease), restartable.atomic():
        restartable.execute_sql("UPDATE notes SET text = 'stopped'")

    other = connect_to(servers.database_url)
    with other.atomic():
        found = other.execute_sql("SELECT text FROM notes FOR UPDATE NOWAIT").fetchall()
    other.close()
    assert found == [("locked",)]


def test_error_that_ended_a_transaction_is_raised(restartable: Database, servers: embedded.Servers) -> None:
    with pytest.raises(OperationalError, match="terminating|server closed"), restartable.atomic():
        other = connect_to(servers.database_url)
        other.execute_sql("SELECT pg_terminate_backend(%s)", restartable.execute_sql(_PID).fetchone())
        other.close()
        restartable.execute_sql("SELECT 1")


def test_a_server_that_is_away_is_reported_in_one_line(servers: embedded.Servers, restartable: Database) -> None:
    servers.stop("postgres")
    try:
        with pytest.raises(DatabaseUnavailable, match=r"^PostgreSQL did not answer: .*\Z"), translate_postgres_errors():
            restartable.execute_sql("SELECT 1")
    finally:
        servers.start("postgres")


@pytest.mark.direct_only(reason="threads share the connections of a pooler")
def test_each_thread_has_a_connection_of_its_own(postgres: Database) -> None:
    together = threading.Barrier(2, timeout=10)

    def pid() -> int:
        number: int = postgres.execute_sql(_PID).fetchone()[0]
        together.wait()
        postgres.close()
        return number

    with ThreadPoolExecutor(2) as threads:
        first, second = (threads.submit(pid) for _ in range(2))

    assert first.result() != second.result()


def test_thread_waiting_for_its_server_does_not_delay_others(
    postgres: Database,
) -> None:
    waits, may_go_on = threading.Event(), threading.Event()

    def be_silent_to_others() -> None:
        if threading.current_thread() is not threading.main_thread():
            waits.set()
            assert may_go_on.wait(PATIENCE_S)

    with at_step(psycopg2, "connect", "before", be_silent_to_others), ThreadPoolExecutor(1) as another:
        waiting = another.submit(postgres.connect)
        assert waits.wait(PATIENCE_S)
        postgres.close()
        answered = postgres.execute_sql("SELECT 1").fetchone()
        unanswered = not waiting.done()
        may_go_on.set()
        another.submit(postgres.close).result(PATIENCE_S)

    assert (answered, unanswered) == ((1,), True)


@pytest.mark.parametrize("setting", ["statement_timeout", "lock_timeout", "idle_in_transaction_session_timeout"])
def test_statements_and_waits_have_timeouts(postgres: Database, setting: str) -> None:
    (limit,) = postgres.execute_sql(f"SELECT setting::int FROM pg_settings WHERE name = '{setting}'").fetchone()

    assert 0 < limit <= 60_000


@pytest.fixture
def limited_role(postgres: Database, admin: Connection) -> Iterator[str]:
    """A role whose transactions may take 50 ms."""
    if postgres.server_version < 170000:
        pytest.skip("transaction_timeout is new in PostgreSQL 17")
    with admin.cursor() as cursor:
        cursor.execute("CREATE ROLE limited LOGIN; ALTER ROLE limited SET transaction_timeout = '50ms'")
        yield "limited"
        cursor.execute("DROP ROLE limited")


@pytest.mark.direct_only(reason="a pooler rejects the options of a direct connection")
@pytest.mark.parametrize("prepared_statements", ["auto", "on", "off"])
def test_limit_of_a_role_for_transactions_is_lifted(
    settings: Settings, limited_role: str, prepared_statements: PreparedStatements
) -> None:
    url = make_dsn(settings.require_database_url(), user=limited_role)
    connected = connect_to(url, prepared_statements)

    with connected.atomic():
        connected.execute_sql("SELECT pg_sleep(0.1)")
        shown = connected.execute_sql("SHOW transaction_timeout").fetchone()
    connected.close()

    assert shown == ("0",)


def test_limit_of_the_url_for_transactions_stays(settings: Settings, limited_role: str) -> None:
    connected = connect_to(f"{settings.database_url}%20-ctransaction_timeout%3D1234")

    with connected.atomic():
        shown = connected.execute_sql("SHOW transaction_timeout").fetchone()
    connected.close()

    assert shown == ("1234ms",)


@pytest.mark.direct_only(reason="a pooler takes no options at the start")
def test_the_url_s_own_options_win(settings: Settings) -> None:
    connected = connect_to(f"{settings.database_url}%20-cstatement_timeout%3D1234&application_name=mine")

    shown = [connected.execute_sql(f"SHOW {name}").fetchone()[0] for name in ("statement_timeout", "application_name")]
    connected.close()
    assert shown == ["1234ms", "mine"]


def test_session_in_another_time_zone_reads_and_compares_the_same_moments(
    settings: Settings, statuses: type[UserStatus]
) -> None:
    due = datetime(2026, 7, 1, 12, tzinfo=timezone(timedelta(hours=9)))
    database.close()
    database.initialize(connect_to(f"{settings.database_url}%20-ctimezone%3DAsia%2FTokyo"))
    statuses.create(user_id=1, clear_status_at=due)

    read = statuses.get(statuses.scheduled_for_cleanup(due))

    assert (read.clear_status_at, read.clear_status_at.tzinfo) == (due, UTC)
    assert not statuses.select().where(statuses.scheduled_for_cleanup(due - timedelta(microseconds=1))).exists()
    assert statuses.select(fn.to_char(statuses.clear_status_at, "HH24")).scalar() == "12"
    database.close()


def test_naive_datetime_is_rejected(statuses: type[UserStatus]) -> None:
    with pytest.raises(ValueError, match="has no timezone"):
        statuses.create(user_id=1, clear_status_at=datetime(2026, 1, 1))  # noqa: DTZ001


@pytest.mark.parametrize("url", ["postgresql://me:hunter2@host/db?nosuch=1", "postgresql://me:hunter2%zz@host/db"])
def test_url_that_libpq_rejects_is_reported_without_its_password(url: str) -> None:
    with pytest.raises(SettingsError, match="libpq says") as refusal:
        connect_to(url)

    assert "hunter2" not in str(refusal.value)


def test_connections_of_this_library_have_distinct_names(postgres: Database, admin: Connection) -> None:
    (pid,) = postgres.execute_sql(_PID).fetchone()

    with admin.cursor() as cursor:
        cursor.execute("SELECT application_name FROM pg_stat_activity WHERE pid = %s", (pid,))
        assert cursor.fetchone() == ("housekeeping",)


def test_failed_first_statement_is_not_retried_and_keeps_the_connection(
    postgres: Database, admin: Connection, settings: Settings
) -> None:
    set_in_session(postgres, "lock_timeout = '50ms'")
    before = postgres.execute_sql("SELECT pg_backend_pid()").fetchone()
    admin.autocommit = False
    with admin.cursor() as cursor:
        cursor.execute(f"LOCK TABLE {settings.schema_name}.runs")

    with pytest.raises(OperationalError, match="lock timeout"), postgres.atomic():
        postgres.execute_sql(f"SELECT 1 FROM {settings.schema_name}.runs")

    admin.rollback()
    assert postgres.execute_sql("SELECT pg_backend_pid()").fetchone() == before
