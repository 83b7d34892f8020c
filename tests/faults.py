"""Faults planted at the edge: between the library and a real Redis or PostgreSQL, at a point that the test chooses."""

from __future__ import annotations

import functools
import itertools
import os
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, Literal

import pytest
import redis
from peewee import OperationalError
from redis.connection import AbstractConnection

from tests.internals.core import MAIN
from tests.internals.database import connect_to, database
from tests.sentinel_servers import PORTS

PATIENCE_S: Final = 60
_LOADS_A_SCRIPT: Final = b"$6\r\nSCRIPT\r\n"
#: Before the command is sent, or after its answer was read but before the client returns it.
Where = Literal["before", "after"]


class Crash(BaseException):
    """Simulated end of a process: no later command of it reaches Redis."""


class Exchanges:
    """Exchanges of this thread with Redis, counted from 1.

    Attributes:
      total: Number of exchanges so far.
      commands: What was sent, one item for each exchange.
    """

    def __init__(self, everywhere: bool) -> None:
        self.total = 0
        self.commands: list[bytes] = []
        self._at: dict[tuple[int, Where], Callable[[], object]] = {}
        self._whenever: list[tuple[list[bytes], Where, Callable[[], object]]] = []
        self._thread = None if everywhere else threading.get_ident()
        self._unanswered: dict[int, bytes] = {}
        self._dead = False

    def at(self, number: int, where: Where, fault: Callable[[], object]) -> None:
        """Raise this fault at the exchange with this number."""
        self._at[number, where] = fault

    def whenever(self, texts: Sequence[str], where: Where, fault: Callable[[], object]) -> None:
        """Raise this fault at each exchange whose command contains all these texts; loading a script is none."""
        self._whenever.append(([text.encode() for text in texts], where, fault))

    def send(self, command: bytes, send: Callable[[], None]) -> None:
        """Count the exchange and send its command, unless its fault is raised before."""
        if self._thread not in (None, threading.get_ident()):
            send()
            return
        self.total += 1
        self.commands.append(command)
        self._raise("before", command)
        send()
        self._unanswered[threading.get_ident()] = command

    def read(self, read: Callable[[], Any]) -> Any:
        """Return the answer, unless the fault of its exchange is raised in its place."""
        command = self._unanswered.pop(threading.get_ident(), None)
        if command is None:
            return read()
        try:
            return read()
        except redis.exceptions.NoScriptError:
            command = b""  # it had no effect, and is sent again after its script is loaded
            raise
        finally:
            self._raise("after", command)

    def _raise(self, where: Where, command: bytes) -> None:
        fault = self._at.pop((self.total, where), None)
        for texts, when, repeated in self._whenever:
            if when == where and command and _LOADS_A_SCRIPT not in command and all(text in command for text in texts):
                fault = repeated
        if self._dead:
            raise Crash
        if fault is not None:
            self._dead = fault is crash
            fault()


@contextmanager
def exchanges(*, everywhere: bool = False) -> Iterator[Exchanges]:
    """Count the exchanges of this thread, or of the whole process, with Redis during the block."""
    counted = Exchanges(everywhere)
    send, read = AbstractConnection.send_packed_command, AbstractConnection.read_response

    def send_packed_command(self: AbstractConnection, command: Any, check_health: bool = True) -> None:
        # Not the connection's own greeting, and not the question to a Sentinel where the server is.
        if not check_health or _of_sentinel(self):
            send(self, command, check_health)
            return
        packed = command if isinstance(command, bytes) else b"".join(command)
        with _disconnected(self):
            counted.send(packed, lambda: send(self, command, check_health))

    def read_response(self: AbstractConnection, *args: Any, **options: Any) -> Any:
        if _of_sentinel(self):
            return read(self, *args, **options)
        with _disconnected(self):
            return counted.read(lambda: read(self, *args, **options))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AbstractConnection, "send_packed_command", send_packed_command)
        patch.setattr(AbstractConnection, "read_response", read_response)
        yield counted


@contextmanager
def unavailable_database() -> Iterator[None]:
    """Lead the main database's connection to a port that refuses it."""
    with database.using(MAIN):
        before = database.obj
        database.initialize(connect_to("postgresql://127.0.0.1:1/nowhere"))
    try:
        yield
    finally:
        database.initialize(before)


@contextmanager
def _disconnected(connection: AbstractConnection) -> Iterator[None]:
    """Close the connection if a fault, or anything but an answer of Redis, is raised in the block."""
    try:
        yield
    except redis.ResponseError:
        raise
    except BaseException:
        connection.disconnect()
        raise


def _of_sentinel(connection: AbstractConnection) -> bool:
    return getattr(connection, "port", None) in PORTS


def crash() -> None:
    raise Crash


def lose_connection() -> None:
    raise redis.ConnectionError("connection reset")


def lose_database() -> None:
    raise OperationalError("the server closed the connection")


def once(fault: Callable[[], object]) -> Callable[[], None]:
    """Return a fault that is raised the first time only."""
    return at_number(1, fault)


@contextmanager
def redis_fault(
    command: str = "", where: Where = "before", fault: Callable[[], object] = lose_connection
) -> Iterator[Exchanges]:
    """Raise the fault at each exchange of this thread with Redis in the block whose command contains this text."""
    with exchanges() as made:
        made.whenever([command], where, fault)
        yield made


def at_number(number: int, fault: Callable[[], object]) -> Callable[[], None]:
    """Return a fault that is raised at the call with this number only, counted from 1."""
    calls = itertools.count(1)

    def count() -> None:
        if next(calls) == number:
            fault()

    return count


@contextmanager
def at_step(owner: Any, name: str, where: Where, fault: Callable[[], object]) -> Iterator[None]:
    """Call the fault before or after each call of a public function or method in the block."""
    assert not name.startswith("_"), "a test that names internals pins them"
    step = getattr(owner, name)

    @functools.wraps(step)
    def faulty(*args: Any, **options: Any) -> Any:
        if where == "before":
            fault()
        answer = step(*args, **options)
        if where == "after":
            fault()
        return answer

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, faulty)
        yield


@contextmanager
def instead_of_pauses(step: Callable[[], object] = lambda: None) -> Iterator[None]:
    """Call a function instead of `time.sleep` in this thread; other threads would otherwise loop without a pause."""
    sleep, mine = time.sleep, threading.get_ident()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "sleep", lambda seconds: step() if threading.get_ident() == mine else sleep(seconds))
        yield


@contextmanager
def start_lost(where: Where) -> Iterator[None]:
    """Lose the first exchange of a delivery with Redis, and its repetition."""
    with exchanges() as made:
        for number in (1, 2):
            made.at(number, where, lose_connection)
        yield


def kill_myself() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def elsewhere(action: Callable[[], object]) -> Callable[[], None]:
    """Return a function that runs the action in another thread, like another process would."""

    def do() -> None:
        thread = threading.Thread(target=action)
        thread.start()
        thread.join(PATIENCE_S)
        assert not thread.is_alive()

    return do


def exit_code_of_fork(function: Callable[[], int]) -> int:
    """Call the function in a fork of this process, which ends with the returned number, and return that."""
    with warnings.catch_warnings():
        # Python warns of locks that other threads hold; from 3.15 on, the warning is raised if it is an error.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if not child:
        try:
            os._exit(function())
        finally:
            os._exit(99)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
