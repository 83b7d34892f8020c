"""Temporary servers for measurements: PostgreSQL with production settings, and Redis."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import quote

from housekeeping import embedded
from housekeeping.embedded import folders
from housekeeping.embedded.processes import unprivileged_account
from housekeeping.embedded.programs import find_postgres
from housekeeping.embedded.server import Postgres, data_folder, wait

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
    account = unprivileged_account()
    with embedded.start(postgres=False) as redis:
        folder = folders.create([redis.folder.parent], account)
        postgres = Postgres(program.path, folder.path, account, wait)
        postgres.settings = settings
        try:
            postgres.create()
            postgres.start()
            versions = {"postgres": program.version, **redis.versions}
            yield Servers(folder.path / "s", redis.redis_url, versions, settings, program.path.resolve().parent)
        finally:
            postgres.discard()
            folder.remove()
