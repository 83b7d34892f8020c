"""A process of its own that runs a sweep once and kills itself at the n-th thing it says to the outside."""

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
import redis

from housekeeping.core.errors import HousekeepingError
from housekeeping.database.connection import database

#: How long a run over a test's few rows may take before something in it hangs.
PATIENCE_S: Final = 60
#: What Python reports of itself (audit events) that others can see: files, programs, connections, requests.
_OUTSIDE: Final = (
    *(f"os.{name}" for name in ("remove", "rename", "rmdir", "mkdir", "link", "symlink", "truncate")),
    *("subprocess.Popen", "socket.connect", "http.client.send"),
)
_WRITES: Final = os.O_WRONLY | os.O_RDWR | os.O_CREAT
_CHANGES: Final = re.compile(r'(INSERT INTO|UPDATE|DELETE FROM) ("[^"]+"(?:\."[^"]+")?)')
_LONGEST: Final = 120  # characters of a point


@dataclass(frozen=True, slots=True)
class Ended:
    """How a process ended.

    Attributes:
      points: What it did, in order, as far as it came; a killed one did not do the last of them.
      killed: Whether it came to the point at which it was to be killed.
      said: What the function returned.
    """

    points: list[str]
    killed: bool
    said: Any


def in_a_process(function: Callable[[], Any], kill_at: int | None, alive: int) -> Ended:
    """Call the function in a forked process, on connections of its own, and wait for its end.

    Parameters:
      kill_at: The number of the point, from 0, before which it kills itself by SIGKILL; null: it lives.
      alive: The number of an advisory lock that each of its sessions shares for as long as the server knows it.

    Raises:
      HousekeepingError: When it fails in a way a run does not, or hangs.
    """
    database.close()  # two processes must not share its connection
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        # Python warns where there are other threads, whose locks may be held for ever in the child. It uses none of
        # theirs: its connections are new, and what the library shares with its threads is made anew by a fork.
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        _be_the_child(function, kill_at, alive, writing)
    os.close(writing)
    try:
        lines = _read_all(reading)
    finally:
        os.close(reading)
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)  # it has ended, or hangs
        status = os.waitpid(pid, 0)[1]
    said = [json.loads(line) for line in lines.splitlines()]
    points = [line["point"] for line in said if "point" in line]
    broken = next((line["broken"] for line in said if "broken" in line), None)
    if broken is not None:
        raise HousekeepingError(f"the process of the run broke off:\n{broken}")
    ended = [line["returned"] for line in said if "returned" in line]
    if not ended and not (kill_at is not None and len(points) == kill_at + 1 and os.WIFSIGNALED(status)):
        raise HousekeepingError(f"the process of the run ended by itself after {points[-1:]}, with status {status}")
    return Ended(points, not ended, ended[0] if ended else None)


def _read_all(reading: int) -> str:
    deadline, read = time.monotonic() + PATIENCE_S, b""
    while True:
        readable, _, _ = select.select([reading], [], [], max(0.0, deadline - time.monotonic()))
        if not readable:
            last = read.decode(errors="replace").splitlines()[-1:]
            raise HousekeepingError(f"the process of the run was at work for {PATIENCE_S} seconds, at last at {last}")
        some = os.read(reading, 65_536)
        if not some:
            return read.decode()
        read += some


def _be_the_child(function: Callable[[], Any], kill_at: int | None, alive: int, writing: int) -> NoReturn:
    try:
        # What it writes there would be points of its first start only.
        sys.dont_write_bytecode = True
        said = _Said(writing, kill_at)
        _hear_of_everything(said, alive)
        database.connect()
        said.begin()
        returned = function()
        said.end()
        said.write({"returned": returned})
    except BaseException:
        with suppress(BaseException):
            said.write({"broken": traceback.format_exc()})
    finally:
        # Nothing of the parent's is to be ended by its child: no fixtures, no exit handlers.
        os._exit(0)


class _Said:
    """Tells the parent of each point, and ends the process at one."""

    def __init__(self, writing: int, kill_at: int | None) -> None:
        self._writing = writing
        self._left = kill_at
        self._thread: int | None = None

    def begin(self) -> None:
        """Points count from now on, those of this thread."""
        self._thread = threading.get_ident()

    def end(self) -> None:
        """Points count no more."""
        self._thread = None

    def point(self, what: str) -> None:
        if threading.get_ident() != self._thread:
            return
        self.write({"point": what if len(what) <= _LONGEST else f"{what[:_LONGEST]}..."})
        if self._left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        if self._left is not None:
            self._left -= 1

    def write(self, line: dict[str, Any]) -> None:
        os.write(self._writing, json.dumps(line, default=str).encode() + b"\n")


def _hear_of_everything(said: _Said, alive: int) -> None:
    """Make each statement, command and effect a point; in a process that does nothing else afterwards."""
    connect, command, pipeline = psycopg2.connect, redis.Redis.execute_command, redis.client.Pipeline.execute

    class Cursor(psycopg2.extensions.cursor):
        def execute(self, query: Any, vars: Any = None) -> None:
            said.point(_in_short(query if isinstance(query, str) else str(query)))
            super().execute(query, vars)

    def connect_and_share(*args: Any, **parameters: Any) -> Any:
        connection = connect(*args, **{"cursor_factory": Cursor, **parameters})
        with connection.cursor(cursor_factory=psycopg2.extensions.cursor) as cursor:
            cursor.execute("SELECT pg_advisory_lock_shared(%s)", (alive,))
        connection.commit()
        return connection

    def execute_command(self: Any, *args: Any, **options: Any) -> Any:
        said.point(f"Redis: {args[0]}")
        return command(self, *args, **options)

    def execute_pipeline(self: Any, raise_on_error: bool = True) -> Any:
        said.point("Redis: a pipeline")
        return pipeline(self, raise_on_error)

    psycopg2.connect = connect_and_share
    redis.Redis.execute_command = execute_command  # type: ignore[method-assign]
    redis.client.Pipeline.execute = execute_pipeline  # type: ignore[method-assign]

    def audit(event: str, args: tuple[Any, ...]) -> None:
        if event in _OUTSIDE or (event == "open" and isinstance(args[2], int) and args[2] & _WRITES):
            said.point(f"{event} {args[1] if event.startswith(('socket', 'http')) else args[0]}")

    sys.addaudithook(audit)


def _in_short(sql: str) -> str:
    begin, plain = re.fullmatch(r"(BEGIN; )?(.*)", " ".join(sql.split())).groups("")  # type: ignore[union-attr]
    changes = [" ".join(found) for found in _CHANGES.findall(plain)]
    return f"{begin}WITH ... {', '.join(changes)}" if plain.startswith("WITH") and changes else f"{begin}{plain}"
