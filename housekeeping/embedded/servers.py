"""Caller's side of embedded servers: start them, get their URLs, and talk to their supervisor."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import tempfile
import threading
import weakref
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self
from urllib.parse import quote

import housekeeping
from housekeeping.core.errors import EmbeddedServerError
from housekeeping.embedded.programs import Program, find_postgres, find_redis

_ANSWER_SECONDS: Final = 240  # longer than any command of the supervisor takes
_END_SECONDS: Final = 60
_PACKAGE: Final = Path(__file__).resolve().parents[1]
#: The supervisor runs the package of this file, whatever the search path would find first, and without the imports
#: of the `housekeeping` package itself.
_SUPERVISOR: Final = """
import sys, types
housekeeping = sys.modules["housekeeping"] = types.ModuleType("housekeeping")
housekeeping.__path__, housekeeping.__version__ = [sys.argv[1]], sys.argv[2]
from housekeeping.embedded import supervisor
supervisor.main()
"""


def start(postgres: bool = True, redis: bool = True) -> Servers:
    """Start real servers in a temporary folder; return when they accept connections.

    Use the result as a context manager, or call `Servers.close`.

    Raises:
      EmbeddedServerError: When a server is not found or does not start; nothing is left behind.
      SettingsError: When ``HOUSEKEEPING_EMBEDDED`` has an unknown value.
    """
    if os.name != "posix":
        raise EmbeddedServerError("embedded servers need Linux or macOS; give the URLs of servers of your own")
    return Servers(find_postgres() if postgres else None, find_redis() if redis else None)


class Servers:
    """Running servers; leaving the ``with`` block stops them and removes every trace.

    They also stop when this process ends for any reason. A forked child may use the URLs, but cannot control the
    servers.

    Attributes:
      folder: The temporary folder with all files of the servers.
      versions: The servers' versions for display: ``{"postgres": "18.4", "redis": "Valkey 9.1.2"}``.
    """

    folder: Path

    def __init__(self, postgres: Program | None, redis: Program | None) -> None:
        programs = {"postgres": postgres, "redis": redis}
        self.versions = {name: program.version for name, program in programs.items() if program}
        self._lock = threading.RLock()
        self._parents = list(dict.fromkeys(os.path.realpath(parent) for parent in (tempfile.gettempdir(), "/tmp")))
        # In its own session, so that Ctrl-C in a terminal goes to this process only.
        self._supervisor = subprocess.Popen(
            [sys.executable, "-P", "-c", _SUPERVISOR, str(_PACKAGE), housekeeping.__version__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
        )
        _open_here.add(self)
        try:
            paths = {name: str(program.path) if program else None for name, program in programs.items()}
            self.folder = Path(self._request({"parents": self._parents, **paths})["folder"])
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
        self._command("start", server)

    def stop(self, server: str) -> None:
        """Shut down ``postgres`` or ``redis`` cleanly; PostgreSQL keeps its data, Redis does not."""
        self._command("stop", server)

    def restart(self, server: str) -> None:
        """Stop and start ``postgres`` or ``redis``."""
        self._command("restart", server)

    def kill(self, server: str) -> None:
        """Kill ``postgres`` or ``redis`` as SIGKILL does; PostgreSQL keeps committed data."""
        self._command("kill", server)

    def close(self) -> None:
        """Stop the servers and wait until every trace is removed; a second call does nothing.

        Raises:
          EmbeddedServerError: When something could not be removed.
        """
        with self._lock:
            if self not in _open_here:
                return
            _open_here.discard(self)
            self._close_pipe()
            try:
                status = self._supervisor.wait(_END_SECONDS)
            except subprocess.TimeoutExpired:
                self._supervisor.kill()
                status = self._supervisor.wait()
        if status != 0 or self._folder_left:
            self._clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _command(self, action: str, server: str) -> None:
        self._check_name(server)
        with self._lock:
            if self not in _open_here:
                raise EmbeddedServerError(
                    f"cannot {action} {server}: the servers are closed or belong to another process"
                )
            try:
                self._request({"do": action, "server": server})
            except EmbeddedServerError:
                raise
            except BaseException:
                # Interrupted: the pending answer would be read as that of the next command.
                self.close()
                raise

    def _check_name(self, server: str) -> None:
        if server not in self.versions:
            raise EmbeddedServerError(f"no server {server!r} was started here, only: {', '.join(self.versions)}")

    def _request(self, request: dict[str, Any]) -> dict[str, Any]:
        requests, answers = self._supervisor.stdin, self._supervisor.stdout
        assert requests is not None and answers is not None
        try:
            requests.write(json.dumps(request).encode() + b"\n")
            ready, _, _ = select.select([answers], [], [], _ANSWER_SECONDS)
            answer: dict[str, Any] = json.loads(answers.readline() if ready else b"")
        except (OSError, ValueError) as error:
            raise EmbeddedServerError("the supervisor of the embedded servers ended or hangs") from error
        if "error" in answer:
            raise EmbeddedServerError(answer["error"])
        return answer

    def _close_pipe(self) -> None:
        for pipe in (self._supervisor.stdin, self._supervisor.stdout):
            if pipe is not None:
                pipe.close()

    @property
    def _folder_left(self) -> bool:
        return hasattr(self, "folder") and self.folder.exists()

    def _clear(self) -> None:
        # The supervisor was killed: clean up as the next start would.
        from housekeeping.embedded.supervisor import clear_leftovers

        clear_leftovers(Path(parent) for parent in self._parents)
        if self._folder_left:
            raise EmbeddedServerError(f"could not stop the servers in {self.folder} or not remove the folder")


_open_here: Final[weakref.WeakSet[Servers]] = weakref.WeakSet()


def _close_inherited() -> None:
    # The supervisor sees the end of its pipe only when all copies are closed. A forked child would keep the servers
    # running after this process was killed.
    for servers in list(_open_here):
        servers._close_pipe()
        servers._lock = threading.RLock()
    _open_here.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_inherited)
