"""Temporary MariaDB server with production settings, for comparisons with pt-archiver."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from housekeeping.embedded.server import Server, UnprivilegedUser, spawn, unprivileged_user
from housekeeping.embedded.servers import clear_folder, create_folder

DATABASE: Final = "visits"
_PROGRAMS: Final = ("mariadbd", "mariadb", "mariadb-install-db", "pt-archiver")
SETTINGS: Final = {
    "innodb_buffer_pool_size": "1G",
    "innodb_flush_log_at_trx_commit": "1",
    # As many changes as PostgreSQL's max_wal_size allows before a checkpoint would disturb a turn.
    "innodb_log_file_size": "2G",
    # Perl knows no encoding called utf8mb4, so that pt-archiver's --bulk-insert needs this one.
    "character_set_server": "utf8mb3",
    "local_infile": "on",  # for --bulk-insert
}
_SETUP_SECONDS: Final = 120


def missing_programs() -> str | None:
    """Return why the comparison is not possible; None if it is."""
    missing = [name for name in _PROGRAMS if _found(name) is None]
    if not missing:
        return None
    return f"{', '.join(missing)} not found (Debian: mariadb-server, percona-toolkit)"


def program(name: str) -> str:
    """Return the path of a program that `missing_programs` does not name."""
    found = _found(name)
    assert found is not None, name
    return found


def _found(name: str) -> str | None:
    # Ordinary users of Debian have no sbin in their path.
    return shutil.which(name, path=f"{os.environ.get('PATH', os.defpath)}:/usr/local/sbin:/usr/sbin")


class MariaDB(Server):
    """MariaDB that listens on a socket only. Its superuser ``root`` needs no password."""

    title = "MariaDB"
    part = "m"
    stop_signal = signal.SIGKILL

    @property
    def socket(self) -> Path:
        """Return the path of the socket."""
        return self._part / "socket"

    def __init__(self, program_path: Path, folder: Path, user: UnprivilegedUser | None) -> None:
        super().__init__(program_path, folder, user)
        options = [f"--datadir={self._part / 'data'}", "--auth-root-authentication-method=normal", "--skip-test-db"]
        command: list[str | Path] = [program("mariadb-install-db"), "--no-defaults", "--skip-name-resolve", *options]
        if spawn(command, self._user, self._part, self._log).wait(_SETUP_SECONDS) != 0:
            raise self._failure("could not be set up by mariadb-install-db")

    def launch(self) -> None:
        command: list[str | Path] = [self._program, "--no-defaults", "--skip-networking", f"--socket={self.socket}"]
        command += [f"--datadir={self._part / 'data'}", *(f"--{name}={value}" for name, value in SETTINGS.items())]
        self.process = spawn(command, self._user, self._part, self._log)

    def _ready(self) -> bool:
        return subprocess.run([*self.client(""), "-e", "SELECT 1"], capture_output=True).returncode == 0

    def client(self, database: str = DATABASE) -> list[str]:
        """Return the command of a client that executes statements from its stdin."""
        return [program("mariadb"), "--no-defaults", f"--socket={self.socket}", "--user=root", "-N", database]

    def execute(self, statements: str) -> list[str]:
        """Execute statements and return the lines that they print.

        Raises:
          RuntimeError: A statement failed.
        """
        done = subprocess.run(self.client(), input=statements, capture_output=True, text=True)
        if done.returncode != 0:
            raise RuntimeError(f"MariaDB: {done.stderr.strip()}")
        return done.stdout.splitlines()


@contextmanager
def started() -> Iterator[MariaDB]:
    """Run a server with an empty database, and remove it with its data when the block ends.

    Raises:
      EmbeddedServerError: The server does not start.
    """
    user = unprivileged_user()
    folder, lock = create_folder(dict.fromkeys((Path(tempfile.gettempdir()), Path("/tmp"))), user)
    server: MariaDB | None = None
    try:
        server = MariaDB(Path(program("mariadbd")), folder, user)
        server.start()
        subprocess.run([*server.client(""), "-e", f"CREATE DATABASE {DATABASE}"], check=True)
        yield server
    finally:
        if server is not None:
            server.kill()
        clear_folder(folder)
        os.close(lock)
