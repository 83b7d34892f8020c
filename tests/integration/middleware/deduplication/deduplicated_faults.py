"""Faults between a process and a real Redis, at a point that the test chooses."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final, Literal

import pytest
import redis
from redis.connection import AbstractConnection

from tests.sentinel_servers import PORTS

PATIENCE_S: Final = 10
#: Before the command is sent, or after its answer was read but before the client returns it.
Where = Literal["before", "after"]


class Crash(BaseException):
    """Simulated end of a process: no later command of it reaches Redis."""


class Exchanges:
    """Exchanges of this thread with Redis, counted from 1.

    Attributes:
      total: Number of exchanges so far.
    """

    def __init__(self) -> None:
        self.total = 0
        self._faults: dict[tuple[int, Where], Callable[[], None]] = {}
        self._thread = threading.get_ident()
        self._dead = False

    def at(self, number: int, where: Where, fault: Callable[[], None]) -> None:
        """Raise this fault at the exchange with this number."""
        self._faults[number, where] = fault

    def count(self, where: Where) -> None:
        """Count the exchange and raise its fault, if any."""
        if threading.get_ident() == self._thread:
            self.total += where == "before"
            fault = self._faults.pop((self.total, where), None)
            if self._dead:
                raise Crash
            if fault is not None:
                self._dead = fault is crash
                fault()


@contextmanager
def exchanges() -> Iterator[Exchanges]:
    """Count the exchanges of this thread with Redis during the block."""
    counted = Exchanges()
    send, read = AbstractConnection.send_packed_command, AbstractConnection.read_response

    def send_packed_command(self: AbstractConnection, command: Any, check_health: bool = True) -> None:
        # Not the connection's own greeting, and not the question to a Sentinel where the server is.
        if not check_health or _of_sentinel(self):
            send(self, command, check_health)
            return
        try:
            counted.count("before")
        except BaseException:
            self.disconnect()
            raise
        send(self, command, check_health)

    def read_response(self: AbstractConnection, *args: Any, **options: Any) -> Any:
        if _of_sentinel(self):
            return read(self, *args, **options)
        try:
            return read(self, *args, **options)
        finally:
            try:
                counted.count("after")
            except BaseException:
                self.disconnect()
                raise

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AbstractConnection, "send_packed_command", send_packed_command)
        patch.setattr(AbstractConnection, "read_response", read_response)
        yield counted


def _of_sentinel(connection: AbstractConnection) -> bool:
    return getattr(connection, "port", None) in PORTS


def crash() -> None:
    raise Crash


def lose_connection() -> None:
    raise redis.ConnectionError("connection reset")


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
