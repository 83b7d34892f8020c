"""Clocks and their differences, the time limit of a run, and how long a command or page waits for a server.

Clocks are passed as arguments, so that a test decides what time it is.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar, copy_context
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Final, Protocol


class Clock(Protocol):
    """Source of the current time."""

    def now(self) -> datetime:
        """Return the current time in UTC, timezone-aware."""

    def monotonic(self) -> float:
        """Return the seconds since a fixed moment; never goes backwards."""


class SystemClock:
    """The machine's own clocks."""

    def now(self) -> datetime:
        return datetime.now(UTC)

    def monotonic(self) -> float:
        return time.monotonic()


SYSTEM_CLOCK: Final[Clock] = SystemClock()


class ServerClock(SystemClock):
    """A server's clock that was read once and advances with this machine's monotonic clock.

    Parameters:
      now: The server's current time.
    """

    def __init__(self, now: datetime) -> None:
        self._read = now
        self._read_at = self.monotonic()

    def now(self) -> datetime:
        return self._read + timedelta(seconds=self.monotonic() - self._read_at)


def limit_ms(limit: timedelta) -> int:
    """Return a time limit in milliseconds, at least 1, because 0 is no limit to PostgreSQL."""
    return max(1, round(limit.total_seconds() * 1000))


class RunBudget:
    """Time limit of one run, measured from the construction of this object.

    A run checks it *between* units of work. It never interrupts one: a statement that hangs is ended by the database's
    ``statement_timeout``.

    Parameters:
      limit: The maximum time until a run stops taking new work.
      clock: Source of the elapsed time.

    Attributes:
      seen: Seconds elapsed at the last call of `spent` or `exceeded`.
    """

    def __init__(self, limit: timedelta, clock: Clock) -> None:
        self._configured_s = self._limit_s = limit.total_seconds()
        self._clock = clock
        self._started_at = clock.monotonic()
        self.seen = 0.0

    def narrow(self, limit: timedelta | None) -> None:
        """Lower the limit for now; None restores the configured one."""
        self._limit_s = self._configured_s if limit is None else min(self._configured_s, limit.total_seconds())

    def spent(self) -> float:
        """Return the seconds since construction."""
        self.seen = self._clock.monotonic() - self._started_at
        return self.seen

    def share(self) -> float:
        """Return the elapsed share of the limit: 1 when it is reached, more after that."""
        return self.spent() / self._limit_s

    def left(self) -> float:
        """Return the seconds until the limit; negative after it."""
        return self._limit_s - self.spent()

    def exceeded(self) -> bool:
        """Return whether *more* than the limit has elapsed; exactly the limit has not."""
        return self.spent() > self._limit_s


#: Seconds that an interactive command or page waits for a server. libpq has no shorter timeout for connecting.
PATIENCE_S: Final = 2
#: Seconds after which a failed attempt was a timeout. A server that is down refuses at once.
_WAITED_S: Final = 0.5


class _Impatience:
    """State of a block of `impatient`.

    Attributes:
      silent: Server -> the error of the attempt that it has not answered.
    """

    def __init__(self) -> None:
        self.silent: dict[str, Exception] = {}
        self._ended = threading.Event()
        self._watcher: threading.Thread | None = None
        self._wait: tuple[float, Callable[[], object]] | None = None

    @contextmanager
    def watch(self, look: Callable[[], object]) -> Iterator[None]:
        if self._watcher is None:
            # In the block's context, so that both know the same silent servers.
            run = copy_context().run
            self._watcher = threading.Thread(target=run, args=(self._watch,), name="housekeeping-patience", daemon=True)
            self._watcher.start()
        self._wait = time.monotonic(), look
        try:
            yield
        finally:
            self._wait = None

    def end(self) -> None:
        self._ended.set()

    def _watch(self) -> None:
        left_s: float = PATIENCE_S
        while not self._ended.wait(left_s):
            wait, left_s = self._wait, PATIENCE_S
            if wait is None:
                continue
            began, look = wait
            if (waited_s := time.monotonic() - began) < PATIENCE_S:
                left_s -= waited_s
            else:
                look()


_impatience: Final[ContextVar[_Impatience | None]] = ContextVar("impatience", default=None)


@contextmanager
def impatient() -> Iterator[None]:
    """Wait at most two seconds for each server in the block, and contact no server again that has not answered.

    A worker waits longer, because a timeout would discard the work it has begun. An operator who looks for the reason
    why nothing runs needs the answer now, above all while a server hangs.
    """
    block = _Impatience()
    before = _impatience.set(block)
    try:
        yield
    finally:
        _impatience.reset(before)
        block.end()


def is_impatient() -> bool:
    """Return whether the code is within `impatient`."""
    return _impatience.get() is not None


def is_silent(server: str) -> bool:
    """Return whether the server has not answered within the block of `impatient`."""
    block = _impatience.get()
    return block is not None and server in block.silent


def contacting(server: str, errors: type[Exception] | tuple[type[Exception], ...]) -> AbstractContextManager[None]:
    """Contact a server in the block. Within `impatient`, raise the earlier error again if it has timed out before.

    Parameters:
      errors: The errors that an attempt raises if the server does not answer.
    """
    block = _impatience.get()
    return nullcontext() if block is None else _contacting(block, server, errors)


@contextmanager
def _contacting(
    block: _Impatience, server: str, errors: type[Exception] | tuple[type[Exception], ...]
) -> Iterator[None]:
    if server in block.silent:
        raise block.silent[server]
    began = time.monotonic()
    try:
        yield
    except errors as error:
        if time.monotonic() - began >= _WAITED_S:
            block.silent[server] = error
        raise


@contextmanager
def waiting(server: str, hang_up_if_silent: Callable[[], object]) -> Iterator[None]:
    """Wait for the answer of a connected server in the block, which may take long.

    Neither a client library nor the kernel ends the wait for a server whose processes are suspended.

    Parameters:
      hang_up_if_silent: Within `impatient`, called in another thread after each two seconds of waiting. It tries a new
        connection by `contacting`, and closes the one that waits if the server is silent.
    """
    block = _impatience.get()
    if block is None or server in block.silent:
        yield
        return
    with block.watch(hang_up_if_silent):
        yield


#: A larger difference raises an alert.
TOLERATED: Final = timedelta(seconds=5)
#: With a larger difference no run starts unless it is forced. The shortest period of a schedule: a clock that is
#: further off sends ticks that the others have done or not reached.
REFUSED: Final = timedelta(minutes=1)

DATABASE: Final = "the database"
REDIS: Final = "Redis"


@dataclass(frozen=True, slots=True)
class ClockSkew:
    """Difference between this machine's clock and a server's.

    Attributes:
      server_at: The server's time.
      ahead: Minimum lead of this machine over the server; negative if the machine is behind.
      server: Name of the server in texts.
    """

    server_at: datetime
    ahead: timedelta
    server: str = DATABASE

    @classmethod
    def between(cls, before: datetime, server_at: datetime, after: datetime, server: str = DATABASE) -> ClockSkew:
        """Return the difference, given this machine's times before and after the server answered.

        It is zero if the server's time is between the two, so that a slow answer raises no alert.
        """
        # Sorted, because this machine's clock may have been set back in between.
        earliest, latest = sorted((before, after))
        ahead = max(earliest - server_at, timedelta()) - max(server_at - latest, timedelta())
        return cls(server_at, ahead, server)

    @property
    def seconds(self) -> float:
        """Seconds that this machine is ahead of the server; negative if it is behind."""
        return round(self.ahead.total_seconds(), 3)

    @property
    def exceeded(self) -> bool:
        """Whether the difference is more than the tolerated 5 s."""
        return abs(self.ahead) > TOLERATED

    @property
    def refused(self) -> bool:
        """Whether the difference is more than one minute, so that no run starts."""
        return abs(self.ahead) > REFUSED

    def __str__(self) -> str:
        here = self.server_at + self.ahead
        side = "ahead of" if self.ahead > timedelta() else "behind"
        return (
            f"this machine ({socket.gethostname()}) says {here:%Y-%m-%d %H:%M:%S} UTC, {self.server} "
            f"{self.server_at:%Y-%m-%d %H:%M:%S} UTC: {abs(self.seconds):,.1f} s {side} {self.server}; "
            f"check NTP on this machine and on {self.server}'s"
        )
