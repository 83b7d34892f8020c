"""Fixtures of the tests that stand on PostgreSQL."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg2
import pytest
import redis
from psycopg2.extensions import connection as Connection

from housekeeping import Settings
from housekeeping.workers.user_status_cleanup.models import UserStatus
from tests.conftest import Urls
from tests.integration.statements import watch_statements
from tests.internals.core import MAIN, SystemClock, error_reporting, metrics
from tests.internals.database import Database, database
from tests.internals.engine import failures
from tests.internals.leases import LeaseStore, lease_store
from tests.internals.ledger import NOW, Heartbeat, ProcessRow, RedisHeartbeats, Run, heartbeat_store

#: Adds this many statuses whose time is `due`, an SQL expression that may use n, from 1 on.
AddStatuses = Callable[..., None]
#: Writes a process's heartbeat that is so old.
Beat = Callable[..., None]
#: Loses the lease of a key, as an emptied Redis does.
LoseLease = Callable[[str], None]
#: Executes a statement in another session, and returns its rows.
Do = Callable[[str], list[tuple[Any, ...]]]
#: Sets this machine's clock so far ahead of the real one.
SetAhead = Callable[[timedelta], None]
#: Makes a trigger act, in PL/pgSQL, before an event such as ``DELETE ON orders`` of rows that a condition holds for.
Plant = Callable[[str, str, str], None]
#: Holds the result of a query locked in another session for as long as the block.
Locked = Callable[[str], AbstractContextManager[None]]


@pytest.fixture
def application_url(urls: Urls, settings: Settings) -> str:
    """URL of an application's own connections to the database of its tables, direct with every topology."""
    separator = "&" if "?" in urls.database else "?"
    return f"{urls.database}{separator}options=-csearch_path%3D{settings.namespace}"


@pytest.fixture
def do(postgres: Database, admin: Connection) -> Do:
    def execute(statement: str) -> list[tuple[Any, ...]]:
        with admin.cursor() as cursor:
            cursor.execute(statement)
            return cursor.fetchall() if cursor.description else []

    return execute


@pytest.fixture
def postgres_18(postgres: Database) -> None:
    """PostgreSQL 18 or newer, which has virtual columns, constraints that are not enforced, and temporal keys."""
    if postgres.server_version < 180000:
        pytest.skip("it is about what is new in PostgreSQL 18")


@pytest.fixture
def statuses(postgres: Database) -> type[UserStatus]:
    """The empty table of user statuses."""
    postgres.create_tables([UserStatus])
    return UserStatus


@pytest.fixture
def add_statuses(statuses: type[UserStatus], admin: Connection) -> AddStatuses:
    def add(count: int, due: str, *, first_id: int = 1) -> None:
        with admin.cursor() as cursor:
            cursor.execute(
                "INSERT INTO user_statuses (user_id, clear_status_at) "
                f"SELECT n + {first_id - 1}, {due} FROM generate_series(1, {count}) AS n"
            )

    return add


@pytest.fixture
def plant(postgres: Database, admin: Connection) -> Plant:
    def plant(event: str, where: str, act: str) -> None:
        (kind, _, table), name = event.partition(" ON "), re.sub(r"\W", "_", event)
        with admin.cursor() as cursor:
            cursor.execute(
                f"CREATE OR REPLACE FUNCTION {name}() RETURNS trigger LANGUAGE plpgsql AS "
                f"$$ BEGIN IF {where} THEN {act}; END IF; RETURN {'OLD' if kind == 'DELETE' else 'NEW'}; END $$;"
                f"DROP TRIGGER IF EXISTS {name} ON {table};"
                f"CREATE TRIGGER {name} BEFORE {event} FOR EACH ROW EXECUTE FUNCTION {name}()"
            )

    return plant


@pytest.fixture
def locked(urls: Urls, settings: Settings, postgres: Database) -> Locked:
    @contextmanager
    def hold(query: str) -> Iterator[None]:
        holder = psycopg2.connect(urls.database, options=f"-csearch_path={settings.namespace}")
        try:
            with holder.cursor() as cursor:
                cursor.execute(query)
            yield
        finally:
            # Wait until the server has released the lock.
            holder.rollback()
            holder.close()

    return hold


@pytest.fixture
def last_run(postgres: Database) -> Callable[[], Any]:
    """The newest row of the ledger."""
    return lambda: Run.select().order_by(Run.id.desc()).first()


@pytest.fixture
def error_hooks() -> Iterator[list[error_reporting.Hook]]:
    """The error hooks of this process, without those of other tests. No cause has been reported yet."""
    before = error_reporting.hooks[:]
    error_reporting.hooks.clear()
    failures.reported_at.clear()
    yield error_reporting.hooks
    error_reporting.hooks[:] = before


@pytest.fixture
def reported(error_hooks: list[error_reporting.Hook]) -> list[dict[str, Any]]:
    """The error reports sent from now on."""
    seen: list[dict[str, Any]] = []
    error_hooks.append(lambda error, about: seen.append({"error": error, **about}))
    return seen


@pytest.fixture
def export_to(monkeypatch: pytest.MonkeyPatch) -> Callable[[metrics.Exporter], None]:
    """Sets the exporter of this process's metrics."""
    return lambda exporter: monkeypatch.setattr(metrics, "exporter", exporter)


@pytest.fixture
def beat(redis_client: redis.Redis, settings: Settings) -> Beat:
    store = heartbeat_store(settings)
    assert store is not None

    def write(process_id: str, heartbeat: Heartbeat, age: timedelta = timedelta()) -> None:
        store.write(process_id, heartbeat)
        if isinstance(store, RedisHeartbeats):
            redis_client.zincrby(f"{settings.namespace}:process_heartbeats", -age.total_seconds(), process_id)
        else:
            with database.using(MAIN):
                ProcessRow.update(at=NOW - age).where(ProcessRow.id == process_id).execute()

    return write


@pytest.fixture
def leases(redis_client: redis.Redis, settings: Settings) -> LeaseStore:
    """The leases of the installation."""
    return lease_store(settings)


@pytest.fixture
def lose_lease(
    request: pytest.FixtureRequest, redis_client: redis.Redis, settings: Settings, admin: Connection
) -> LoseLease:
    def lose(key: str) -> None:
        if request.config.getoption("topology") != "postgres-only":
            assert redis_client.delete(f"{settings.namespace}:lease:{key}")
            return
        with admin.cursor() as cursor:
            cursor.execute(f"DELETE FROM {settings.schema_name}.held_leases WHERE key = %s", (key,))
            assert cursor.rowcount

    return lose


@pytest.fixture
def set_ahead(monkeypatch: pytest.MonkeyPatch) -> SetAhead:
    """Sets this machine's clock so far ahead of the real one."""
    return lambda by: monkeypatch.setattr(SystemClock, "now", lambda self: datetime.now(UTC) + by)


@pytest.fixture
def statements(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Every statement the library sends from now on."""
    sent: list[str] = []
    watch_statements(monkeypatch, lambda sql: sent.append(sql))
    return sent
