"""Bisection: find the rows that make a batch fail, so that the others are processed."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from datetime import timedelta
from typing import Final, Generic, TypeVar

from peewee import DataError, IntegrityError, InternalError, OperationalError

from housekeeping.core.errors import HandlerFailed
from housekeeping.database.connection import sqlstate
from housekeeping.database.time_limit import shorten_time_limits

T = TypeVar("T")

#: What a single row can cause: a constraint, a trigger or an event's handler that raises, a value out of range.
_ROW_ERRORS: Final = (IntegrityError, DataError, InternalError, HandlerFailed)
#: statement_timeout and lock_timeout: a slow trigger, or one that waits for another transaction's lock.
_TIMEOUTS: Final = ("57014", "55P03")
#: Class of PostgreSQL's codes for a transaction that cannot write, after a failover perhaps. The driver calls some of
#: them internal errors.
_CANNOT_WRITE: Final = "25"

#: Seconds that a part of a batch has once the whole batch has timed out: a healthy one needs milliseconds.
_PART_S: Final = 2.0
#: Seconds that a single row has then.
_ROW_S: Final = 5.0
#: Seconds that the bisection of a batch that timed out may take. The run's budget (30 s for the shortest built-in
#: workers), a statement_timeout of 30 s and these 45 s stay below the actor's time limit of 120 s.
_BISECTION_S: Final = 45.0


def is_timeout(error: BaseException) -> bool:
    """Return whether PostgreSQL ended a statement because it ran, or waited for a lock, too long."""
    return isinstance(error, OperationalError) and sqlstate(error) in _TIMEOUTS


def is_row_error(error: BaseException) -> bool:
    """Return whether a single row can have caused the error.

    Any other (a lost connection, a missing right, a read-only server) concerns the whole run.
    """
    if isinstance(error, _ROW_ERRORS):
        return not (sqlstate(error) or "").startswith(_CANNOT_WRITE)
    return is_timeout(error)


def shorten_timeouts(rows: int) -> None:
    """Lower the timeouts of the open transaction to the time allowed for a part of this many rows."""
    shorten_time_limits(timedelta(seconds=_ROW_S if rows == 1 else _PART_S))


class Bisection(Generic[T]):
    """The parts of a batch that failed, in the order in which to try them.

    A batch that failed with an error is split in halves, front to back. A batch that timed out is probed first: its
    first, middle and last row, each alone. If all three time out, the database is at fault and not a row. If not, the
    others are split into parts that should take a second, and what times out again is tried after everything else.
    Of three rows or fewer, each is taken for a bad row.

    Parameters:
      items: The rows of the batch.
      error: What it failed with.

    Attributes:
      timed_out: Whether something timed out, so that `shorten_timeouts` applies to each part.
      part_size: The largest part that should not time out.
    """

    def __init__(self, items: Sequence[T], error: BaseException) -> None:
        self._began_at = self._part_began_at = time.monotonic()
        self._parts: deque[Sequence[T]] = deque()
        self._rest: Sequence[T] = ()
        self._any_succeeded = False
        self._slowest_s = 0.0
        self.timed_out = is_timeout(error)
        self.part_size = max(1, len(items) // 2)
        if not self.timed_out:
            self._parts.extend(_halves(items) or ([items] if items else []))
            return
        probes = dict.fromkeys((0, len(items) // 2, len(items) - 1)) if items else {}
        self._parts.extend([items[place]] for place in probes)
        self._rest = [item for place, item in enumerate(items) if place not in probes]

    def next(self) -> Sequence[T] | None:
        """Return the part to try next; None when all were tried."""
        if not self._parts and self._rest:
            if self._slowest_s > 0:
                self.part_size = min(self.part_size, max(1, int(_PART_S / 2 / self._slowest_s)))
            size, rest, self._rest = self.part_size, self._rest, ()
            self._parts.extend(rest[start : start + size] for start in range(0, len(rest), size))
        self._part_began_at = time.monotonic()
        return self._parts.popleft() if self._parts else None

    def succeeded(self) -> None:
        """Record that the part was processed."""
        self._any_succeeded = True
        if self._rest:
            self._slowest_s = max(self._slowest_s, time.monotonic() - self._part_began_at)

    def failed(self, part: Sequence[T], error: BaseException) -> bool:
        """Record that the part failed. Return whether it is a single row, which counts as failed.

        Raises:
          BaseException: `error` itself, when it is not a row's, or when all rows that were probed timed out.
        """
        if not is_row_error(error):
            raise error
        if not is_timeout(error):
            self._parts.extendleft(reversed(_halves(part)))
            return len(part) == 1
        self.timed_out = True
        self._parts.extend(_halves(part))
        if self._rest and not self._parts and not self._any_succeeded:
            raise error
        return len(part) == 1

    def took_too_long(self) -> bool:
        """Return whether a batch that timed out has been bisected for long enough."""
        return self.timed_out and time.monotonic() - self._began_at > _BISECTION_S


def _halves(part: Sequence[T]) -> list[Sequence[T]]:
    """Return both halves of a part; none of a single row."""
    middle = len(part) // 2
    return [part[:middle], part[middle:]] if middle else []
