"""Tables and rows of the bulk imports."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
from blinker import NamedSignal
from psycopg2.extensions import connection as Connection

from tests.internals.database import Database
from tests.internals.workers import IMPORT_MODELS as MODELS

#: The manual clock's time, and the last moment that is not stale then, in SQL.
NOW = "timestamptz '2026-01-01 00:00:00+00'"
LIMIT = f"{NOW} - interval '24 hours'"
STALE = f"{LIMIT} - interval '1 hour'"
FRESH = f"{NOW} - interval '1 hour'"

#: For `add_trackers`: each entity there is.
EACH = "id FROM bulk_import_entities"

Row = tuple[Any, ...]


@dataclass(frozen=True)
class Tables:
    """The three tables, read and filled from another session."""

    admin: Connection

    def do(self, statement: str) -> list[Row]:
        with self.admin.cursor() as cursor:
            cursor.execute(statement)
            return cursor.fetchall() if cursor.description else []

    def add_imports(self, count: int, updated_at: str = STALE, status: int | str = 1, first_id: int = 1) -> None:
        """`updated_at` and `status` are SQL, and may use n, from 1 on."""
        self.do(
            "INSERT INTO bulk_imports (id, user_id, source_type, status, has_failures, created_at, updated_at) "
            f"SELECT n + {first_id - 1}, 7, 0, {status}, false, {STALE}, {updated_at} "
            f"FROM generate_series(1, {count}) AS n"
        )

    def add_entities(
        self, count: int, updated_at: str = STALE, status: int | str = 1, first_id: int = 1, of: int = 1_000_000
    ) -> None:
        """Add entities of one import, which is created (finished) if missing."""
        self.do(
            "INSERT INTO bulk_imports (id, user_id, source_type, status, has_failures, created_at, updated_at) "
            f"VALUES ({of}, 7, 0, 2, false, {STALE}, {STALE}) ON CONFLICT DO NOTHING"
        )
        self.do(
            "INSERT INTO bulk_import_entities (id, bulk_import_id, namespace_id, source_type, source_full_path, "
            "destination_name, destination_namespace, status, has_failures, created_at, updated_at) "
            f"SELECT id, {of}, 1, id % 2, 'old/group-' || id, 'g', 'new', {status}, false, {STALE}, {updated_at} "
            f"FROM generate_series(1, {count}) AS n, LATERAL (SELECT n + {first_id - 1}) AS of (id)"
        )

    def add_trackers(self, entity: int | str, statuses: str, updated_at: str = FRESH) -> None:
        """Add a tracker with each of these states for the entity with this id, or for each entity of a query."""
        self.do(
            "INSERT INTO bulk_import_trackers (bulk_import_entity_id, relation, stage, status, has_next_page, "
            "created_at, updated_at) "
            f"SELECT e, 'relation ' || ord, 0, s, false, {STALE}, {updated_at} "
            f"FROM (SELECT {entity}) AS entities (e), unnest(ARRAY[{statuses}]) WITH ORDINALITY AS of (s, ord)"
        )

    def imports(self) -> dict[int, int]:
        return dict(self.do("SELECT id, status FROM bulk_imports ORDER BY id"))

    def entities(self) -> dict[int, int]:
        return dict(self.do("SELECT id, status FROM bulk_import_entities ORDER BY id"))

    def trackers(self, entity: int = 1) -> list[int]:
        rows = self.do(f"SELECT status FROM bulk_import_trackers WHERE bulk_import_entity_id = {entity} ORDER BY id")
        return [status for (status,) in rows]

    def refuse(self, table: str, condition: str, doing: str = "RAISE EXCEPTION 'not this one'") -> None:
        """Make the database reject changes of rows that match a condition, like a constraint or trigger."""
        self.do(
            f"CREATE OR REPLACE FUNCTION refuse_{table}() RETURNS trigger LANGUAGE plpgsql AS "
            f"$$ BEGIN IF {condition} THEN {doing}; END IF; RETURN NEW; END $$;"
            f"DROP TRIGGER IF EXISTS refuse ON {table};"  # PostgreSQL 13 cannot replace one
            f"CREATE TRIGGER refuse BEFORE UPDATE ON {table} "
            f"FOR EACH ROW EXECUTE FUNCTION refuse_{table}()"
        )


@pytest.fixture
def tables(postgres: Database, admin: Connection) -> Tables:
    """The empty tables."""
    postgres.create_tables(list(MODELS.values()))
    return Tables(admin)


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Callable[[str], list[dict[str, Any]]]:
    """The log lines of a text: their level and fields."""

    def of(event: str) -> list[dict[str, Any]]:
        return [vars(record) for record in caplog.records if record.message == event]

    return of


@contextmanager
def heard(event: NamedSignal) -> Iterator[list[list[dict[str, Any]]]]:
    """The rows an event is sent with, send by send."""
    sent: list[list[dict[str, Any]]] = []

    def note(sender: Any, *, rows: list[dict[str, Any]], worker: str, run_id: int | None) -> None:
        assert worker == sender and run_id is not None
        sent.append(rows)

    with event.connected_to(note):
        yield sent
