"""Running SQL statements at the end of the shutdown grace."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import dramatiq
import pytest
import redis
from dramatiq.brokers.redis import RedisBroker
from peewee import OperationalError
from psycopg2.extensions import TRANSACTION_STATUS_ACTIVE
from psycopg2.extensions import connection as Connection

from housekeeping import Settings
from tests.declarations import changed
from tests.integration.conftest import AddStatuses
from tests.integration.middleware.applications import close_all, eventually, installed, queued, working
from tests.internals.database import Database, database
from tests.internals.engine import register
from tests.internals.ledger import Run
from tests.internals.middleware import statement_of_this_thread
from tests.internals.workers import status_sweep as sweep

pytestmark = pytest.mark.redis_broker_only(reason="it is about the database, whatever carries the messages")

#: Longer than any test waits; the fixture ends it. It is no SELECT, because those are repeated.
_LONG = "DO 'BEGIN PERFORM pg_sleep(100); END'"


@pytest.fixture
def broker(settings: Settings, postgres: Database, redis_client: redis.Redis) -> Iterator[RedisBroker]:
    yield installed(settings.model_copy(update={"grace_s": 0.5}))
    close_all()


@pytest.fixture
def active(admin: Connection, settings: Settings, postgres: Database) -> Iterator[Callable[[str], list[int]]]:
    """Wait for the number of this test's backends that run such a statement."""
    mine = postgres.connect_params["options"]
    assert settings.namespace in mine

    def find(statement: str) -> list[int]:
        with admin.cursor() as cursor:
            cursor.execute(
                "SELECT pid FROM pg_stat_activity "
                # Through a pooler, settings precede the statement.
                "WHERE state = 'active' AND right(query, length(%s)) = %s AND pid <> pg_backend_pid()",
                [statement, statement],
            )
            return [pid for (pid,) in cursor.fetchall()]

    yield find
    with admin.cursor() as cursor:
        for pid in find(_LONG):
            cursor.execute("SELECT pg_terminate_backend(%s)", [pid])


def test_statement_at_end_of_grace_is_canceled_and_its_message_requeued(  # R5
    broker: RedisBroker, active: Callable[[str], list[int]]
) -> None:
    @dramatiq.actor(broker=broker, max_retries=0)
    def waits() -> None:
        database.execute_sql(_LONG)

    waits.send()
    with working(broker):
        eventually(lambda: active(_LONG))

    [message] = queued(broker)
    assert "retries" not in message.options
    assert broker.client.llen(f"{broker.namespace}:default") == 1


def test_actor_that_translates_the_cancellation_is_requeued_too(  # R5
    broker: RedisBroker, active: Callable[[str], list[int]]
) -> None:
    @dramatiq.actor(broker=broker, max_retries=0)
    def waits() -> None:
        try:
            database.execute_sql(_LONG)
        except BaseException as error:
            raise ValueError("it did not work") from error

    waits.send()
    with working(broker):
        eventually(lambda: active(_LONG))

    assert broker.client.llen(f"{broker.namespace}:default") == 1
    assert queued(broker, "default.XQ") == []


def test_sweep_canceled_in_a_statement_closes_its_row_and_resumes_later(  # R5
    broker: RedisBroker, add_statuses: AddStatuses, admin: Connection
) -> None:
    add_statuses(30, "now() - interval '1 hour' + interval '1 millisecond' * n")
    with admin.cursor() as cursor:
        cursor.execute(
            "CREATE FUNCTION hang() RETURNS trigger LANGUAGE plpgsql AS "
            "$$ BEGIN IF OLD.user_id = 15 THEN PERFORM pg_sleep(100); END IF; RETURN OLD; END $$;"
            "CREATE TRIGGER hangs BEFORE DELETE ON user_statuses FOR EACH ROW EXECUTE FUNCTION hang()"
        )
    actor = register(broker, changed(sweep, batch=10))

    def hangs() -> bool:
        with admin.cursor() as cursor:
            cursor.execute("SELECT 1 FROM pg_stat_activity WHERE wait_event = 'PgSleep' AND query ~ 'user_statuses'")
            return cursor.fetchone() is not None

    actor.send()
    with working(broker):
        eventually(hangs)

    [run] = Run.select()
    assert (run.outcome, run.reason, run.counts["deleted_rows"]) == ("partial", "shutdown", 10)
    assert broker.client.llen(f"{broker.namespace}:{actor.queue_name}") == 1


def test_only_statements_within_an_actor_are_canceled(  # R5
    broker: RedisBroker, active: Callable[[str], list[int]], admin: Connection
) -> None:
    ended: list[BaseException | None] = []

    @dramatiq.actor(broker=broker)
    def waits() -> None:
        database.execute_sql(_LONG)

    def beside() -> None:
        try:
            database.execute_sql(_LONG)
        except OperationalError as error:
            ended.append(error)
        finally:
            database.close()

    waits.send()
    other = threading.Thread(target=beside)
    with working(broker):
        other.start()
        eventually(lambda: len(active(_LONG)) == 2)

    [still_there] = active(_LONG)
    with admin.cursor() as cursor:
        cursor.execute("SELECT pg_terminate_backend(%s)", [still_there])
    other.join(60)
    assert "canceling statement" not in str(ended) and len(ended) == 1


def test_commit_is_not_canceled(  # R5
    postgres: Database, active: Callable[[str], list[int]], admin: Connection, settings: Settings
) -> None:
    with admin.cursor() as cursor:
        cursor.execute(
            "CREATE TABLE slow (id int);"
            "CREATE FUNCTION take_time() RETURNS trigger LANGUAGE plpgsql AS "
            "$$ BEGIN PERFORM pg_advisory_xact_lock(1, hashtext(current_schema())); RETURN NULL; END $$;"
            "CREATE CONSTRAINT TRIGGER slowly AFTER INSERT ON slow DEFERRABLE INITIALLY DEFERRED "
            "FOR EACH ROW EXECUTE FUNCTION take_time();"
            "SELECT pg_advisory_lock(1, hashtext(current_schema()))"
        )
    its_own: list[Any] = []
    failed: list[Exception] = []

    def insert() -> None:
        its_own.append(statement_of_this_thread())
        try:
            with database.atomic():
                database.execute_sql("INSERT INTO slow VALUES (7)")
        except OperationalError as error:
            failed.append(error)
        finally:
            database.close()

    inserting = threading.Thread(target=insert)
    inserting.start()
    eventually(lambda: active("COMMIT"))
    cancelled = its_own[0].cancel()
    with admin.cursor() as cursor:
        cursor.execute("SELECT pg_advisory_unlock(1, hashtext(current_schema()))")
    inserting.join(60)

    assert (cancelled, failed) == (False, [])
    assert database.execute_sql("SELECT id FROM slow").fetchall() == [(7,)]


def test_no_statement_needs_no_cancellation(postgres: Database) -> None:
    statement = statement_of_this_thread()
    assert statement is not None
    without_a_connection = statement.cancel()
    database.execute_sql("SELECT 1")

    assert (without_a_connection, statement.cancel()) == (False, False)


def test_server_that_refuses_the_cancel_connection_is_logged(  # R5
    postgres: Database, active: Callable[[str], list[int]], admin: Connection, caplog: pytest.LogCaptureFixture
) -> None:
    its_own: list[Any] = []
    ended: list[str] = []

    def wait() -> None:
        its_own.append(statement_of_this_thread())
        try:
            database.execute_sql(_LONG)
        except OperationalError as error:
            ended.append(str(error))
        finally:
            database.close()

    waiting = threading.Thread(target=wait)
    waiting.start()
    eventually(lambda: active(_LONG))
    [statement] = its_own
    connection = statement._connection()
    # The server can execute a statement before the thread has returned from sending it.
    eventually(lambda: connection.info.transaction_status == TRANSACTION_STATUS_ACTIVE)
    statement._connection = lambda: _Elsewhere(connection)

    cancelled = statement.cancel()

    with admin.cursor() as cursor:
        cursor.execute("SELECT pg_terminate_backend(%s)", active(_LONG))
    waiting.join(60)
    assert cancelled is False
    assert "Statement could not be canceled" in caplog.text


class _Elsewhere:
    """Connection whose server accepts no other one."""

    closed = 0

    def __init__(self, connection: Any) -> None:
        self._connection = connection

    @property
    def info(self) -> Any:
        info = self._connection.info

        class Info:
            transaction_status = info.transaction_status
            dsn_parameters = {**info.dsn_parameters, "user": "nobody_known", "dbname": "no_such_database"}
            password = None
            backend_pid = info.backend_pid

        return Info
