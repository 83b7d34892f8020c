"""Forked process that runs a function and kills itself at its n-th point.

A point is an action with an effect outside of the process: a SQL statement, a Redis command, a file change.
"""

from __future__ import annotations

import json
import os
import re
import select
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final, NoReturn

import psycopg2
from redis.connection import AbstractConnection

from housekeeping.core.errors import HousekeepingError
from housekeeping.database.connection import close_databases, database

#: Time limit for a run over a test's few rows.
PATIENCE_S: Final = 60
#: Python audit events of actions with outside effects: files, programs, connections, requests.
_OUTSIDE: Final = (
    *(f"os.{name}" for name in ("remove", "rename", "rmdir", "mkdir", "link", "symlink", "truncate")),
    *("subprocess.Popen", "socket.connect", "http.client.send"),
)
#: Redis commands that open or check a connection. They change nothing.
_GREETINGS: Final = frozenset({"HELLO", "AUTH", "CLIENT", "SELECT", "PING"})
_WRITES: Final = os.O_WRONLY | os.O_RDWR | os.O_CREAT
_CHANGES: Final = re.compile(r'(INSERT INTO|UPDATE|DELETE FROM) ("[^"]+"(?:\."[^"]+")?)')
_LONGEST: Final = 120  # characters of a point's description


@dataclass(frozen=True, slots=True)
class Ended:
    """Result of a forked process.

    Attributes:
      points: Descriptions of its points in order. A killed process did not execute the last one.
      killed: Whether it was killed at the requested point; False if it ran to its end.
      returned: The return value of the function; None if it was killed.
    """

    points: list[str]
    killed: bool
    returned: Any


def run_in_process(function: Callable[[], Any], kill_at: int | None, alive: int) -> Ended:
    """Call the function in a forked process with its own connections, and wait for its end.

    Parameters:
      kill_at: Index of the point before which the process kills itself by SIGKILL; None to run to the end.
      alive: Number of a PostgreSQL advisory lock that all of its sessions hold, shared, until the server closes them.

    Raises:
      HousekeepingError: The function raised, or the process hung or died at another point.
    """
    close_databases()  # two processes must not share their connections
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        # Python warns because locks of other threads may stay held in the child. The child uses none of them: its
        # connections are new, and the library recreates what it shares with its threads after a fork.
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        _run_child(function, kill_at, alive, writing)
    os.close(writing)
    try:
        lines = _read_all(reading)
    finally:
        os.close(reading)
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)  # it has ended or hangs
        status = os.waitpid(pid, 0)[1]
    records = [json.loads(line) for line in lines.splitlines()]
    points = [line["point"] for line in records if "point" in line]
    broken = next((line["broken"] for line in records if "broken" in line), None)
    if broken is not None:
        raise HousekeepingError(f"the process of the run failed:\n{broken}")
    ended = [line["returned"] for line in records if "returned" in line]
    if not ended and not (kill_at is not None and len(points) == kill_at + 1 and os.WIFSIGNALED(status)):
        raise HousekeepingError(f"the process of the run ended by itself after {points[-1:]}, with status {status}")
    return Ended(points, not ended, ended[0] if ended else None)


def _read_all(reading: int) -> str:
    deadline, read = time.monotonic() + PATIENCE_S, b""
    while True:
        readable, _, _ = select.select([reading], [], [], max(0.0, deadline - time.monotonic()))
        if not readable:
            last = read.decode(errors="replace").splitlines()[-1:]
            raise HousekeepingError(f"the process of the run took over {PATIENCE_S} seconds; its last line is {last}")
        some = os.read(reading, 65_536)
        if not some:
            return read.decode()
        read += some


def _run_child(function: Callable[[], Any], kill_at: int | None, alive: int, writing: int) -> NoReturn:
    try:
        # Writing bytecode would add points to the first run only.
        sys.dont_write_bytecode = True
        recorder = _Recorder(writing, kill_at)
        _record_everything(recorder, alive)
        database.connect()
        recorder.thread = threading.get_ident()
        returned = function()
        recorder.thread = None
        recorder.write({"returned": returned})
    except BaseException:
        with suppress(BaseException):
            recorder.write({"broken": traceback.format_exc()})
    finally:
        # The child must not run the parent's fixtures and exit handlers.
        os._exit(0)


class _Recorder:
    """Recorder that sends each point to the parent process and kills this one at the requested point."""

    def __init__(self, writing: int, kill_at: int | None) -> None:
        self._writing = writing
        self._left = kill_at
        self.thread: int | None = None  # whose points are recorded

    def point(self, what: str) -> None:
        if threading.get_ident() != self.thread:
            return
        self.write({"point": what if len(what) <= _LONGEST else f"{what[:_LONGEST]}..."})
        if self._left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        if self._left is not None:
            self._left -= 1

    def write(self, line: dict[str, Any]) -> None:
        os.write(self._writing, json.dumps(line, default=str).encode() + b"\n")


def _record_everything(recorder: _Recorder, alive: int) -> None:
    """Make each SQL statement, Redis command and outside effect a point. Patches libraries for the whole process."""
    connect, send = psycopg2.connect, AbstractConnection.send_packed_command

    class Cursor(psycopg2.extensions.cursor):
        def execute(self, query: Any, vars: Any = None) -> None:
            recorder.point(_short_statement(query.decode() if isinstance(query, bytes) else str(query)))
            super().execute(query, vars)

    def connect_and_share(*args: Any, **parameters: Any) -> Any:
        connection = connect(*args, **{"cursor_factory": Cursor, **parameters})
        with connection.cursor(cursor_factory=psycopg2.extensions.cursor) as cursor:
            cursor.execute("SELECT pg_advisory_lock_shared(%s)", (alive,))
        connection.commit()
        return connection

    def send_packed_command(self: AbstractConnection, command: Any, check_health: bool = True) -> None:
        name = _redis_command(command)
        if name not in _GREETINGS:
            recorder.point(f"Redis: {name}")
        send(self, command, check_health)

    psycopg2.connect = connect_and_share
    AbstractConnection.send_packed_command = send_packed_command  # type: ignore[method-assign]

    def audit(event: str, args: tuple[Any, ...]) -> None:
        if event in _OUTSIDE or (event == "open" and isinstance(args[2], int) and args[2] & _WRITES):
            recorder.point(f"{event} {args[1] if event.startswith(('socket', 'http')) else args[0]}")

    sys.addaudithook(audit)


def _redis_command(packed: bytes | list[bytes]) -> str:
    """Return the name of a command, or of the first one of a pipeline."""
    first = packed if isinstance(packed, bytes) else packed[0]
    return first.split(b"\r\n", 3)[2].decode()


def _short_statement(sql: str) -> str:
    begin, plain = re.fullmatch(r"(BEGIN; )?(.*)", " ".join(sql.split())).groups("")  # type: ignore[union-attr]
    changes = [" ".join(found) for found in _CHANGES.findall(plain)]
    return f"{begin}WITH ... {', '.join(changes)}" if plain.startswith("WITH") and changes else f"{begin}{plain}"
