"""Role of PostgreSQL that has exactly the rights that it is given."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from psycopg2.extensions import connection as Connection

from housekeeping import Settings
from tests.internals.database import Database
from tests.internals.doctor import grants
from tests.session_settings import set_in_session


@contextmanager
def connected_as_a_role(
    postgres: Database, settings: Settings, admin: Connection, rights: Mapping[str, tuple[str, ...]]
) -> Iterator[str]:
    """Use a new role within the block, and yield its name.

    Parameters:
      rights: Those on tables of the application, as `doctor` knows them. It has all rights on the library's own tables.
    """
    name = f"role_{uuid.uuid4().hex[:12]}"
    own, theirs = settings.schema_name, settings.namespace
    with admin.cursor() as cursor:
        cursor.execute(f"CREATE ROLE {name} LOGIN")
        cursor.execute(f"GRANT USAGE ON SCHEMA {theirs}, {own} TO {name}")
        cursor.execute(f"GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA {own} TO {name}")
        cursor.execute(f"SET search_path TO {theirs}")
        for statement in grants(name, rights):
            cursor.execute(statement)
    set_in_session(postgres, f"SESSION AUTHORIZATION {name}")
    yield name
    set_in_session(postgres, "SESSION AUTHORIZATION DEFAULT")
    with admin.cursor() as cursor:
        cursor.execute(f"DROP OWNED BY {name}")
        cursor.execute(f"DROP ROLE {name}")
