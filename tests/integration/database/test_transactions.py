from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from uuid import uuid4

import psycopg2
import pytest
from peewee import OperationalError, PeeweeException
from psycopg2.extensions import connection as Connection
from psycopg2.extensions import make_dsn

from housekeeping import Settings
from tests.faults import at_step
from tests.integration.statements import end_session
from tests.internals.database import Database, connect_to

_INSERT = "INSERT INTO notes VALUES (%s)"


class _BrokenOff(Exception):
    pass


def _connected(settings: Settings) -> Database:
    assert settings.database_url is not None
    return connect_to(settings.database_url)


@pytest.fixture
def ours(settings: Settings, postgres: Database) -> Iterator[Database]:
    ours = _connected(settings)
    ours.execute_sql("CREATE TABLE notes (text text)")
    yield ours
    ours.close()


@pytest.fixture
def other(settings: Settings, ours: Database) -> Iterator[Database]:
    other = _connected(settings)
    yield other
    other.close()


def _kill(ours: Database, other: Database) -> None:
    end_session(other.cursor(), ours.connection().info.backend_pid)


def _notes(connected: Database) -> list[str]:
    return [text for (text,) in connected.execute_sql("SELECT text FROM notes ORDER BY text").fetchall()]


@pytest.mark.parametrize(
    ("refused", "parameters"),
    [("SELEC 1", None), ("SELECT %s", (object(),)), ("SELECT %s", ("a\0b",)), ("SELECT %s, %s", (1,))],
    ids=["syntax", "no such type", "zero byte", "too few"],
)
def test_transaction_continues_after_a_rejected_first_statement(ours: Database, refused: str, parameters: Any) -> None:
    with pytest.raises(_BrokenOff), ours.atomic():
        with pytest.raises((PeeweeException, ValueError, IndexError)):
            ours.execute_sql(refused, parameters)
        ours.execute_sql(_INSERT, ("rolled back",))
        raise _BrokenOff

    assert _notes(ours) == []


@pytest.mark.direct_only(reason="a pooler keeps the connection whose server is killed")
def test_transaction_continues_after_reconnecting_at_its_first_statement(ours: Database, other: Database) -> None:
    def away() -> None:
        raise psycopg2.OperationalError("the server is away")

    _kill(ours, other)
    with pytest.raises(_BrokenOff), ours.atomic():
        with at_step(psycopg2, "connect", "before", away), pytest.raises(OperationalError, match="away"):
            ours.execute_sql(_INSERT, ("never",))
        ours.execute_sql(_INSERT, ("rolled back",))
        raise _BrokenOff

    assert _notes(ours) == []


@pytest.mark.parametrize("level", ["SERIALIZABLE", "REPEATABLE READ"])
def test_transaction_has_the_requested_isolation_level(ours: Database, level: str) -> None:
    with ours.atomic(level):
        (found,) = ours.execute_sql("SHOW transaction_isolation").fetchone()

    assert found == level.lower()


@pytest.mark.parametrize(
    ("default", "name", "expected"),
    [
        ("default_transaction_isolation = serializable", "transaction_isolation", "read committed"),
        ("bytea_output = escape", "bytea_output", "hex"),
    ],
)
def test_settings_of_statements_do_not_depend_on_the_role_s_defaults(
    settings: Settings, admin: Connection, default: str, name: str, expected: str
) -> None:
    role = f"strict_{uuid4().hex[:12]}"
    with admin.cursor() as cursor:
        cursor.execute(f"CREATE ROLE {role} LOGIN SUPERUSER PASSWORD 'secret'")
        cursor.execute(f"ALTER ROLE {role} SET {default}")
    handle = connect_to(make_dsn(settings.require_database_url(), user=role, password="secret"))

    with handle.atomic():
        within = handle.execute_sql(f"SHOW {name}").fetchone()
    alone = handle.fetch_at_once(f"SHOW {name}".encode())
    handle.close()
    with admin.cursor() as cursor:
        cursor.execute(f"DROP ROLE {role}")

    assert (within, alone) == ((expected,), [(expected,)])


def test_a_handle_s_own_isolation_level_is_that_of_its_transactions(settings: Settings, ours: Database) -> None:
    strict = Database(ours.database, **ours.connect_params, isolation_level="SERIALIZABLE")
    with strict.atomic():
        (found,) = strict.execute_sql("SHOW transaction_isolation").fetchone()
    strict.close()

    assert found == "serializable"


def test_transaction_begun_without_peewee_counts(ours: Database) -> None:
    ours.begin()
    ours.execute_sql(_INSERT, ("a",))
    ours.execute_sql(_INSERT, ("b",))
    ours.rollback()

    assert _notes(ours) == []


@pytest.mark.parametrize("past", ["connection", "cursor"])
def test_statement_on_the_raw_cursor_belongs_to_the_transaction(ours: Database, past: str) -> None:
    with pytest.raises(_BrokenOff), ours.atomic():
        cursor = ours.connection().cursor() if past == "connection" else ours.cursor()
        cursor.execute(_INSERT, ("rolled back",))
        raise _BrokenOff

    assert _notes(ours) == []


def test_reconnecting_at_the_first_statement_keeps_open_blocks(ours: Database, other: Database) -> None:
    told = []
    _kill(ours, other)

    with ours:
        ours.after_commit(lambda: told.append("committed"))
        ours.execute_sql(_INSERT, ("kept",))

    assert told == ["committed"]
    assert _notes(ours) == ["kept"]


def test_closing_the_connection_drops_a_pending_begin(ours: Database) -> None:
    ours.transaction().__enter__()
    ours.pop_transaction()
    ours.close()

    ours.execute_sql(_INSERT, ("kept",))
    ours.close()

    assert _notes(ours) == ["kept"]
