"""Temporary servers for measurements (PostgreSQL with production settings, Redis), and databases on them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

import psycopg2
from psycopg2 import sql
from psycopg2.extensions import connection as Connection

from housekeeping import embedded
from housekeeping.database.connection import connect_to, database
from housekeeping.embedded.server import Postgres, data_folder, find_postgres, unprivileged_user
from housekeeping.embedded.servers import clear_folder, create_folder
from housekeeping.ledger import schema

_SETTINGS: Final = {
    "listen_addresses": "",
    "unix_socket_permissions": "0700",
    "max_connections": "50",
    "shared_buffers": "1GB",
    "timezone": "UTC",
    "dynamic_shared_memory_type": "mmap",
    # No background work during a turn; each round starts with a checkpoint.
    "autovacuum": "off",
    "checkpoint_timeout": "1h",
    "max_wal_size": "8GB",
    "min_wal_size": "1GB",
    "wal_recycle": "on",
    "bgwriter_lru_maxpages": "0",
}
_DURABLE: Final = {"fsync": "on", "synchronous_commit": "on", "full_page_writes": "on"}
_QUICK: Final = {"fsync": "off", "synchronous_commit": "on", "full_page_writes": "on"}


@dataclass(frozen=True, slots=True)
class Servers:
    """Addresses, versions and settings of the servers.

    Attributes:
      postgres_socket: The folder of PostgreSQL's socket; its superuser ``postgres`` needs no password.
      settings: What PostgreSQL was started with.
      programs: The folder of PostgreSQL's programs.
    """

    postgres_socket: Path
    redis_url: str
    versions: dict[str, str]
    settings: dict[str, str]
    programs: Path

    @property
    def postmaster(self) -> int:
        """Return PostgreSQL's process id."""
        return int((data_folder(self.postgres_socket.parent) / "postmaster.pid").read_text().split()[0])

    def database_url(self, name: str = "postgres") -> str:
        """Return the URL of the database of this name."""
        return f"postgresql://postgres@/{name}?host={quote(str(self.postgres_socket), safe='')}"


@contextmanager
def started(*, durable: bool) -> Iterator[Servers]:
    """Run servers and remove them with their data when the block ends.

    Parameters:
      durable: Whether a commit waits for the disk.

    Raises:
      EmbeddedServerError: When a server is not found or does not start.
    """
    program = find_postgres()
    settings = {**_SETTINGS, **(_DURABLE if durable else _QUICK)}
    if any(program.path.parents[1].glob("lib/**/pg_stat_statements.so")):
        settings["shared_preload_libraries"] = "pg_stat_statements"
    user = unprivileged_user()
    with embedded.start(postgres=False) as redis:
        folder, lock = create_folder([redis.folder.parent], user)
        postgres: Postgres | None = None
        try:
            postgres = Postgres(program.path, folder, user)
            postgres.settings = settings
            postgres.start()
            versions = {"postgres": program.version, **redis.versions}
            yield Servers(folder / "s", redis.redis_url, versions, settings, program.path.resolve().parent)
        finally:
            if postgres is not None:
                postgres.kill()
            clear_folder(folder)
            os.close(lock)


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
        name = f"turn_of_{template}"
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
