"""WAL of the database server: how fast it is written, and how much is kept for replication slots."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from peewee import PeeweeException

from housekeeping.core.sanitize import error_line
from housekeeping.database.connection import database

_MB: Final = 1024 * 1024  # bytes

#: Both are NULL on a standby, which writes no WAL. A lost slot keeps none, nor does one without `restart_lsn`.
_LOOK: Final = """
WITH position AS (SELECT CASE WHEN NOT pg_is_in_recovery() THEN pg_current_wal_lsn() END AS lsn)
SELECT
    (SELECT pg_wal_lsn_diff(lsn, '0/0') FROM position),
    (SELECT CASE WHEN lsn IS NOT NULL THEN coalesce(max(pg_wal_lsn_diff(lsn, restart_lsn)), 0) END
     FROM position LEFT JOIN pg_replication_slots ON wal_status IS DISTINCT FROM 'lost' GROUP BY lsn)
"""


@dataclass(frozen=True, slots=True)
class WalState:
    """WAL of the server at one moment; None if unknown.

    Attributes:
      position: Bytes written since the server was created.
      slot_lag: Bytes kept for the slowest replication slot; 0 without slots.
      trouble: Why nothing is known.
    """

    position: float | None = None
    slot_lag: float | None = None
    trouble: str | None = None


def read_wal() -> WalState:
    """Return the server's current WAL state. Errors do not raise; the values are then None."""
    try:
        row: Any = database.execute_sql(_LOOK).fetchone()
    except PeeweeException as error:
        return WalState(trouble=error_line(error))
    position, slot_lag = (None if value is None else float(value) for value in row)
    return WalState(position, slot_lag)


@dataclass(frozen=True, slots=True)
class WalRateNow:
    """Rate of WAL since the last look, and WAL kept for replication slots.

    Attributes:
      mb_per_s: Megabytes per second; None if unknown.
      is_first: Whether this was the first look, so that there is no rate yet.
    """

    mb_per_s: float | None
    slot_lag_mb: float | None
    trouble: str | None
    is_first: bool


class WalRate:
    """Rate at which WAL is written between two looks."""

    def __init__(self, read: Callable[[], WalState] = read_wal) -> None:
        self._read = read
        self._last: tuple[float, float | None] | None = None

    def look(self, now: float) -> WalRateNow:
        """Return the WAL written per second since the last call, and the WAL kept for slots.

        Parameters:
          now: Seconds on a monotonic clock.
        """
        state, last = self._read(), self._last
        self._last = now, state.position
        rate = None
        if last is not None and state.position is not None and last[1] is not None and now > last[0]:
            # After a failover the position can be lower.
            rate = max(0.0, state.position - last[1]) / (now - last[0]) / _MB
        slot_lag_mb = None if state.slot_lag is None else state.slot_lag / _MB
        return WalRateNow(rate, slot_lag_mb, state.trouble, last is None)
