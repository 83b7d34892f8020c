"""Databases for measurements, copied from a template for each turn."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Any, Final

import psycopg2
from psycopg2 import sql
from psycopg2.extensions import connection as Connection

from benchmarks.servers import Servers
from housekeeping.database.connection import connect_to, database
from housekeeping.sweeps.ledger import schema

_COPY: Final = "turn"


@dataclass(frozen=True, slots=True)
class Stage:
    """Copies of templates on one pair of servers."""

    servers: Servers

    def template(self, name: str, models: list[Any], fill: Callable[[Connection], None]) -> str:
        """Make a template with these tables, the library's own and what `fill` puts in, unless it is there; its name.

        Parameters:
          fill: Called with a connection in autocommit; statistics and visibility are taken care of afterwards.
        """
        with self.connected() as admin, admin.cursor() as cursor:
            cursor.execute("SELECT 1 FROM pg_database WHERE datname = %s", (name,))
            if cursor.fetchone() is not None:
                return name
            cursor.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name)))
        database.initialize(connect_to(self.servers.database_url(name)))
        schema.init()
        database.create_tables(models)
        database.close()
        with self.connected(name) as made, made.cursor() as cursor:
            extend(made, "pg_prewarm")
            fill(made)
            cursor.execute("VACUUM (FREEZE, ANALYZE)")
        return name

    @contextmanager
    def copy_of(self, template: str) -> Iterator[str]:
        """Make a warm copy of the template after a checkpoint, for the duration of the block. Yield its name."""
        name = f"{_COPY}_of_{template}"
        with self.connected() as admin, admin.cursor() as cursor:
            drop = sql.SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)").format(sql.Identifier(name))
            cursor.execute(drop)
            # Before version 15, copying files is the only strategy and has no option.
            strategy = " STRATEGY file_copy" if admin.server_version >= 150_000 else ""
            cursor.execute(
                sql.SQL("CREATE DATABASE {} TEMPLATE {}" + strategy).format(
                    sql.Identifier(name), sql.Identifier(template)
                )
            )
            try:
                with self.connected(name) as warmed:
                    _warm(warmed)
                cursor.execute("CHECKPOINT")
                yield name
            finally:
                cursor.execute(drop)

    @contextmanager
    def connected(self, name: str = "postgres") -> Iterator[Connection]:
        """Return an autocommit connection to the database of this name."""
        with closing(psycopg2.connect(self.servers.database_url(name))) as connection:
            connection.autocommit = True
            yield connection


def extend(connection: Connection, extension: str) -> None:
    """Add an extension to the database if the server has it."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT 1 FROM pg_available_extensions WHERE name = %s", (extension,))
        if cursor.fetchone() is not None:
            cursor.execute(sql.SQL("CREATE EXTENSION IF NOT EXISTS {}").format(sql.Identifier(extension)))


def _warm(connection: Connection) -> None:
    """Load every table and index into PostgreSQL's memory."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT 1 FROM pg_extension WHERE extname = 'pg_prewarm'")
        if cursor.fetchone() is not None:
            cursor.execute("SELECT pg_prewarm(oid) FROM pg_class WHERE relkind IN ('r', 'i') AND relpages > 0")
