"""Connections through PgBouncer in transaction mode, which rejects the startup parameter ``options``."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from typing import Any
from uuid import uuid4

import psycopg2
import pytest
import redis
from peewee import OperationalError, Select, fn
from psycopg2.extensions import connection as Connection

from housekeeping import Settings
from housekeeping.testing.assertions import assert_idempotent, assert_survives_kill
from housekeeping.workers.user_status_cleanup.models import UserStatus
from tests.conftest import Urls
from tests.integration.middleware.applications import eventually
from tests.internals.core import Refused, SettingsError
from tests.internals.database import Database, Parameter, PreparedQuery, PreparedStatements, connect_to, database
from tests.internals.middleware import StatementInProgress, statement_of_this_thread
from tests.internals.workers import status_sweep as sweep
from tests.pgbouncer_server import POOL_SIZE, PgBouncer, pgbouncer

_NAMES = ("statement_timeout", "lock_timeout", "idle_in_transaction_session_timeout", "TimeZone", "jit", "search_path")


@pytest.fixture
def pooled(pooler: PgBouncer, settings: Settings, postgres: Database) -> Iterator[Database]:
    """A handle through the pooler, on this test's schema."""
    handle = connect_to(pooler.through(settings.require_database_url()))
    database.initialize(handle)
    yield handle
    handle.close()
    database.initialize(postgres)


def _settings(handle: Database, sql: str = "") -> list[str]:
    values = ", ".join(f"current_setting('{name}')" for name in _NAMES)
    return list(handle.execute_sql(f"SELECT {values} {sql}").fetchone())


def _server_pid(handle: Database) -> int:
    pid: int = handle.execute_sql("SELECT pg_backend_pid()").fetchone()[0]
    return pid


def test_pooler_rejects_what_direct_connections_are_given(pooler: PgBouncer, settings: Settings) -> None:
    with pytest.raises(psycopg2.OperationalError, match="unsupported startup parameter: options"):
        psycopg2.connect(pooler.through(settings.require_database_url()))


def test_statement_through_a_pooler_has_the_limits_of_a_direct_one(pooled: Database, postgres: Database) -> None:
    assert _settings(pooled) == _settings(postgres)


def test_transaction_through_a_pooler_has_the_limits_of_a_direct_one(pooled: Database, postgres: Database) -> None:
    with pooled.atomic():
        first, second = _settings(pooled), _settings(pooled)

    assert first == second == _settings(postgres)


def test_limits_do_not_reach_other_clients_of_the_pool(pooler: PgBouncer, pooled: Database) -> None:
    with psycopg2.connect(pooler.url, application_name="shop") as other, other.cursor() as cursor:
        for _ in range(2 * POOL_SIZE):
            with pooled.atomic():
                _settings(pooled)
            cursor.execute("SELECT current_setting('statement_timeout'), current_setting('application_name')")

            assert cursor.fetchone() == ("0", "shop")
            other.commit()


def test_statement_timeout_ends_a_statement_in_one_message(pooler: PgBouncer, settings: Settings) -> None:
    url = pooler.through(settings.require_database_url())
    handle = connect_to(f"{url}%20-cstatement_timeout%3D50ms")

    with pytest.raises(OperationalError, match="statement timeout"):
        handle.fetch_at_once(b"SELECT pg_sleep(20)")
    handle.close()


@pytest.mark.parametrize("parameters", [None, (), ("50%",)])
def test_settings_with_special_characters_arrive_unchanged(
    pooler: PgBouncer, settings: Settings, parameters: Any
) -> None:
    url = pooler.through(settings.require_database_url())
    handle = connect_to(f"""{url}%20-c%20app.rate%3D5%25%27%5C%20s%20-csearch_path%3D%22A%5C%20b%22%2CPublic""")
    handle.connect()

    shown = "SELECT current_setting('app.rate'), current_setting('search_path')"
    row = handle.execute_sql(f"{shown}, %s" if parameters else shown, parameters).fetchone()

    assert row[:2] == ("5%' s", '"A b", public')
    handle.close()


def test_isolation_level_can_be_set_within_the_transaction(pooled: Database) -> None:
    with pooled.atomic():
        pooled.execute_sql("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY")

        assert pooled.execute_sql("SHOW transaction_isolation").fetchone() == ("repeatable read",)


def _set_for_all_servers(pooler: PgBouncer, statement: str) -> None:
    for _ in range(2 * POOL_SIZE):
        with psycopg2.connect(pooler.url) as other, other.cursor() as cursor:
            cursor.execute(statement)


def test_pooled_statement_reads_what_is_committed_whatever_the_default(pooler: PgBouncer, pooled: Database) -> None:
    _set_for_all_servers(pooler, "SET default_transaction_isolation = serializable")
    with pooled.atomic():
        within = pooled.execute_sql("SHOW transaction_isolation").fetchone()

    alone = pooled.fetch_at_once(b"SHOW transaction_isolation")
    _set_for_all_servers(pooler, "RESET default_transaction_isolation")

    assert (within, alone) == (("read committed",), [("read committed",)])


def test_read_only_of_the_url_applies_to_the_transaction(pooler: PgBouncer, settings: Settings) -> None:
    url = pooler.through(settings.require_database_url())
    handle = connect_to(f"{url}%20-cdefault_transaction_read_only%3Don")

    with pytest.raises(Exception, match="read-only transaction"):
        handle.execute_sql("CREATE TABLE never (id int)")
    handle.close()


def test_rejected_option_of_the_url_is_named(pooler: PgBouncer) -> None:
    handle = connect_to(f"{pooler.url}?options=-e")

    with pytest.raises(SettingsError, match="has the option '-e'"):
        handle.connect()


def test_times_are_read_right_whatever_the_servers_date_style(settings: Settings) -> None:
    at = datetime(2026, 2, 3, 4, 5, 6, tzinfo=UTC)
    handle = connect_to(settings.require_database_url(), "off")
    # As if another client of the pool had left them behind.
    handle.execute_sql("SET datestyle = 'SQL, DMY'")
    handle.execute_sql("SET timezone = 'Asia/Tokyo'")

    with_zone, without = handle.execute_sql("SELECT %s::timestamptz, %s::timestamptz::timestamp", (at, at)).fetchone()

    assert (with_zone, with_zone.utcoffset(), without) == (at, at.utcoffset(), at.replace(tzinfo=None))
    handle.close()


def test_pooler_that_ignores_options_is_recognized_by_the_process_id(urls: Urls, settings: Settings) -> None:
    with pgbouncer(urls.database, lines="ignore_startup_parameters = options") as silent:
        handle = connect_to(silent.through(settings.require_database_url()))

        assert _settings(handle)[:2] == ["30s", "10s"]
        assert handle.prepared() is None
        handle.close()


@pytest.mark.direct_only(reason="it is about direct connections")
@pytest.mark.parametrize(("prepared_statements", "prepares"), [("auto", True), ("on", True), ("off", False)])
def test_prepared_statements_are_a_matter_of_the_setting(
    settings: Settings, prepared_statements: PreparedStatements, prepares: bool
) -> None:
    handle = connect_to(settings.require_database_url(), prepared_statements)

    assert (handle.prepared() is not None) is prepares
    assert _settings(handle)[:2] == ["30s", "10s"]
    handle.close()


def test_with_prepared_statements_on_a_pooler_is_an_error(pooler: PgBouncer, settings: Settings) -> None:
    handle = connect_to(pooler.through(settings.require_database_url()), "on")

    with pytest.raises(OperationalError, match="unsupported startup parameter"):
        handle.connect()


def test_query_in_one_round_trip_works_on_each_server_of_the_pool(pooler: PgBouncer, pooled: Database) -> None:
    query = PreparedQuery(Select([], [fn.pg_backend_pid()]).where(fn.now() > Parameter(0)))
    at = datetime(2026, 2, 3, tzinfo=UTC)
    with psycopg2.connect(pooler.url) as other, other.cursor() as cursor:
        cursor.execute("SELECT 1")  # takes a server
        query.rows_at_once(at)  # needs a second one
        other.commit()

        servers = {query.rows_at_once(at)[0][0] for _ in range(4)}

    assert len(servers) > 1


def test_more_threads_than_servers_share_the_pool(pooled: Database) -> None:
    def work(number: int) -> int:
        with pooled.connection_context(), pooled.atomic():
            pooled.execute_sql("SELECT pg_sleep(0.01)")
            return _server_pid(pooled)

    with ThreadPoolExecutor(3 * POOL_SIZE) as threads:
        servers = set(threads.map(work, range(10 * POOL_SIZE)))

    assert 1 <= len(servers) <= POOL_SIZE


@pytest.mark.parametrize("within", [True, False])
def test_statement_through_a_pooler_can_be_canceled(pooled: Database, admin: Connection, within: bool) -> None:
    statements: list[StatementInProgress | None] = []
    errors: list[Exception] = []
    sleep = f"SELECT pg_sleep(20), '{uuid4()}'"  # other tests may sleep, too

    def work() -> None:
        statements.append(statement_of_this_thread())
        with pooled.connection_context():
            try:
                if within:
                    with pooled.atomic():
                        pooled.execute_sql(sleep)
                else:
                    pooled.fetch_at_once(sleep.encode())
            except OperationalError as error:
                errors.append(error)

    def sleeping() -> bool:
        with admin.cursor() as cursor:
            cursor.execute(
                "SELECT FROM pg_stat_activity WHERE wait_event = 'PgSleep' AND strpos(query, %s) > 0", (sleep,)
            )
            return bool(cursor.rowcount == 1)

    thread = threading.Thread(target=work)
    thread.start()
    eventually(sleeping)
    [statement] = statements
    assert statement is not None

    # The server can execute a statement before the thread has returned from sending it.
    eventually(statement.cancel)

    thread.join(timeout=10)
    assert "canceling statement due to user request" in str(errors[0])


def test_assertions_of_the_kit_refuse_a_pooler(pooled: Database, redis_client: redis.Redis) -> None:
    pooled.create_tables([UserStatus])

    for check in (assert_idempotent, assert_survives_kill):
        with pytest.raises(Refused, match="leads through a pooler"):
            check(sweep)


def test_next_transaction_works_after_a_restart_of_the_pooler(urls: Urls) -> None:
    with pgbouncer(urls.database) as restarted:
        handle = connect_to(restarted.url)
        with handle.atomic():
            handle.execute_sql("SELECT 1")

        restarted.restart()

        with handle.atomic():
            assert _settings(handle)[0] == "30s"
        handle.close()
