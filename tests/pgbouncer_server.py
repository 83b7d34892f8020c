"""PgBouncer in transaction mode in front of the tests' PostgreSQL."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final
from urllib.parse import parse_qsl, quote, urlsplit

import pytest
from psycopg2.extensions import make_dsn, parse_dsn

from tests.internals.embedded import identity_of, unprivileged_user
from tests.rabbitmq_server import free_ports

START_S: Final = 20.0
#: Connections to PostgreSQL for each database; fewer than the eight worker threads of a process.
POOL_SIZE: Final = 4


class PgBouncer:
    """A pooler that can be stopped and started again.

    Parameters:
      target: URL of PostgreSQL. All clients become its user.
      folder: For its configuration and log.
      pool_size: Maximum number of connections to PostgreSQL.
      lines: Further lines of its configuration.
    """

    def __init__(self, target: str, folder: Path, pool_size: int = POOL_SIZE, lines: str = "") -> None:
        self._folder = folder
        self._account = unprivileged_user()
        given = parse_dsn(target)
        self._database, self._user = given.pop("dbname", "postgres"), given.setdefault("user", "postgres")
        [self.port] = free_ports(1)
        self._process: subprocess.Popen[bytes] | None = None
        self._known = known = {name: given[name] for name in ("host", "port", "user", "password") if name in given}
        (folder / "pgbouncer.ini").write_text(
            f"[databases]\n* = {make_dsn(**known)}\n"
            f"[pgbouncer]\nlisten_addr = 127.0.0.1\nlisten_port = {self.port}\nunix_socket_dir =\n"
            f"auth_type = any\npool_mode = transaction\ndefault_pool_size = {pool_size}\nmax_client_conn = 200\n"
            f"server_round_robin = 1\nadmin_users = {self._user}\n{lines}\n"
        )
        if self._account is not None:
            for path in (folder, folder / "pgbouncer.ini"):
                os.chown(path, self._account.uid, self._account.gid)

    @property
    def url(self) -> str:
        return f"postgresql://{quote(self._user)}@127.0.0.1:{self.port}/{quote(self._database)}"

    def through(self, url: str) -> str:
        """Return the URL with its parameters, such as ``options``, but of the pooler."""
        given = urlsplit(url).query
        kept = [part for part in given.split("&") if dict(parse_qsl(part)).keys().isdisjoint(("host", "port"))]
        return f"{self.url}?{'&'.join(kept)}".rstrip("?")

    def leads_to(self, url: str) -> bool:
        """Whether this URL names the pooler's server."""
        given = parse_dsn(url)
        return all(given.get(name) == self._known.get(name) for name in ("host", "port"))

    def start(self) -> None:
        """Start it, and wait until it accepts connections."""
        with (self._folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [_program(), str(self._folder / "pgbouncer.ini")],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                **identity_of(self._account),
            )
        deadline = time.monotonic() + START_S
        while not self._listens():
            said = (self._folder / "log").read_text(errors="replace")
            assert self._process.poll() is None and time.monotonic() < deadline, f"PgBouncer did not start:\n{said}"
            time.sleep(0.02)

    def _listens(self) -> bool:
        with socket.socket() as client:
            return client.connect_ex(("127.0.0.1", self.port)) == 0

    def kill(self) -> None:
        """End it with SIGKILL; all of its connections are closed."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def restart(self) -> None:
        self.kill()
        self.start()


@contextmanager
def pgbouncer(target: str, pool_size: int = POOL_SIZE, lines: str = "") -> Iterator[PgBouncer]:
    """Run a pooler in front of `target`; skip the test if the program is missing, or the URL has several hosts."""
    if "," in parse_dsn(target).get("host", ""):
        pytest.skip("PgBouncer does not choose the primary of several hosts")
    with TemporaryDirectory(prefix="hk-pooler-", ignore_cleanup_errors=True) as folder:
        running = PgBouncer(target, Path(folder), pool_size, lines)
        running.start()
        try:
            yield running
        finally:
            running.kill()


def _program() -> str:
    program = shutil.which("pgbouncer", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin")
    if program is None:
        pytest.skip("no pgbouncer found: it is in the package pgbouncer of Debian and others")
    return program
