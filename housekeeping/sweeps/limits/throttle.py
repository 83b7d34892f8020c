"""Throttle: slows a run down while the database is overloaded, and ends it early if that lasts.

To add a check, add its limit to `ThrottleLimits` in `declared`, its measured value to `DbHealth` in `db_health`, and
the comparison to `Throttle._found`. Operators set the limits by the key ``gates``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, Final

from housekeeping.core.clock import RunBudget
from housekeeping.core.sanitize import described, first_line, shortened, typed_error_line
from housekeeping.core.telemetry.logs import logger as named_logger
from housekeeping.sweeps.limits.db_health import DbHealth, HealthSource, read_health
from housekeeping.sweeps.limits.declared import ThrottleLimits as ThrottleLimits
from housekeeping.sweeps.limits.wal_health import WalRate, WalRateNow

logger = named_logger(__name__)

_CHECK_INTERVAL_S: Final = 2.0  # seconds between two checks; health changes no faster than an operator acts
_FIRST_PAUSE_S: Final = 0.1
_LONGEST_PAUSE_S: Final = 1.0
_LONGEST_REASON: Final = 200  # characters


@dataclass(frozen=True, slots=True)
class ExceededLimit:
    """Check that throttles the run.

    Attributes:
      value: The measured value; of `custom` the reason to wait.
      limit: None for `custom`.
    """

    gate: str
    value: float | str
    limit: float | None


class Throttle:
    """Throttle of one run, called between its batches.

    Parameters:
      tables: Tables of the sweep, by `table_name`; empty: the database is not queried.
      budget: Clock for the waiting time.
      wait: Sleeps for this many seconds, or until the run must stop.
    """

    def __init__(
        self,
        limits: ThrottleLimits,
        tables: Sequence[str],
        budget: RunBudget,
        wait: Callable[[float], object],
        health: HealthSource | None = None,
    ) -> None:
        self._limits = limits
        self._tables = tables
        self._budget = budget
        self._wait = wait
        self._health = health or read_health
        self._wal = WalRate()
        self._checked_at: float | None = None
        self._exceeded: ExceededLimit | None = None
        self._exceeded_since = 0.0
        self._pause_s = 0.0
        self._begun = False
        self._batches: list[float] = []
        self._unknown: set[str] = set()

    @property
    def measures(self) -> bool:
        """Whether the throttle needs the duration of batches."""
        return self._limits.batch_s is not None

    @property
    def is_active(self) -> bool:
        """Whether the last check throttled the run."""
        return self._exceeded is not None

    def took(self, seconds: float) -> None:
        """Record the duration of a batch."""
        self._batches.append(seconds)

    def look(self) -> tuple[list[ExceededLimit], list[str]]:
        """Return all checks over their limits now, and the names of those that are unavailable.

        WAL written per second and the batches' duration are known only during a run.
        """
        self._budget.spent()
        return list(self._found()), sorted(self._unknown)

    def hold(self, give_up: Callable[[], bool]) -> ExceededLimit | None:
        """Wait before the next batch if the run is throttled. Return the check that ends the run; None to continue.

        Before the first batch it waits up to `wait_s` for a healthy database. Between batches it only pauses, each time
        longer, so that the run continues slowly. The checks run at most every two seconds.

        Parameters:
          give_up: Returns whether the run must end for another reason; called while it waits.
        """
        self._check()
        begun, self._begun = self._begun, True
        while self._exceeded is not None:
            if self._budget.seen - self._exceeded_since > self._limits.wait_s:
                return self._end_or_continue(self._exceeded, begun)
            if give_up():
                return self._exceeded
            self._pause_s = min(_LONGEST_PAUSE_S, max(_FIRST_PAUSE_S, 2 * self._pause_s))
            self._wait(self._pause_s)
            self._budget.spent()
            self._check()
            if begun:
                break
        return None

    def as_count(self) -> dict[str, Any]:
        """Return the count ``throttled`` of a run that the throttle ends; empty if it is not throttled."""
        exceeded = self._exceeded
        return (
            {}
            if exceeded is None
            else {"throttled": {"gate": exceeded.gate, "value": exceeded.value, "limit": exceeded.limit}}
        )

    def _end_or_continue(self, exceeded: ExceededLimit, begun: bool) -> ExceededLimit:
        self._exceeded_since = self._budget.seen
        if begun:
            logger.warning(
                "Still throttled, ending the run", gate=exceeded.gate, value=exceeded.value, limit=exceeded.limit
            )
        else:
            logger.info(
                "Throttled run continues slowly", gate=exceeded.gate, value=exceeded.value, limit=exceeded.limit
            )
        return exceeded

    def _check(self) -> None:
        now = self._budget.seen
        if self._checked_at is not None and now - self._checked_at < _CHECK_INTERVAL_S:
            return
        self._checked_at = now
        before, self._exceeded = self._exceeded, next(self._found(), None)
        self._batches.clear()
        if self._exceeded is None:
            self._pause_s = 0.0
        elif before is None:
            self._exceeded_since = now
            exceeded = self._exceeded
            logger.info("Run is throttled", gate=exceeded.gate, value=exceeded.value, limit=exceeded.limit)

    def _found(self) -> Iterator[ExceededLimit]:
        limits = self._limits
        health = self._health(self._tables) if limits.queries_database and self._tables else None
        if health is not None:
            lag, waiting = health.replication_lag_s, health.waiting_locks
            if limits.replication_lag_s is not None and self._known("replication_lag_s", lag, health):
                yield from _over("replication_lag_s", lag, limits.replication_lag_s)
            if limits.waiting_locks is not None and self._known("waiting_locks", waiting, health):
                yield from _over("waiting_locks", waiting, limits.waiting_locks)
            if limits.vacuum and self._known("vacuum", health.vacuum, health):
                yield from _over("vacuum", health.vacuum, 0)
        if limits.batch_s is not None and self._batches:
            yield from _over("batch_s", fmean(self._batches), limits.batch_s)
        if limits.queries_wal:
            wal = self._wal.look(self._budget.seen)
            if limits.wal_mb_per_s is not None and (
                not wal.is_first and self._known("wal_mb_per_s", wal.mb_per_s, wal)
            ):
                yield from _over("wal_mb_per_s", wal.mb_per_s, limits.wal_mb_per_s)
            if limits.slot_lag_mb is not None and self._known("slot_lag_mb", wal.slot_lag_mb, wal):
                yield from _over("slot_lag_mb", wal.slot_lag_mb, limits.slot_lag_mb)
        if limits.custom is not None and (reason := self._reason_of(limits.custom)) is not None:
            yield ExceededLimit("custom", reason, None)

    def _known(self, gate: str, value: float | None, health: DbHealth | WalRateNow) -> bool:
        if value is None:
            self._log_unknown(gate, health.trouble)
        return value is not None

    def _log_unknown(self, gate: str, trouble: str | None) -> None:
        if gate not in self._unknown:
            self._unknown.add(gate)
            logger.info("Health check unavailable, continuing without it", gate=gate, error=trouble)

    def _reason_of(self, custom: Callable[[], str | None]) -> str | None:
        try:
            return reason_to_wait(custom)
        except Exception as error:
            self._log_unknown("custom", typed_error_line(error))
            return None


def reason_to_wait(custom: Callable[[], str | None]) -> str | None:
    """Return why the application's own check wants runs to wait, in one line; None if it does not.

    Raises:
      TypeError: It returned something else than text.
      Exception: It failed.
    """
    reason = custom()
    if reason is None:
        return None
    if not isinstance(reason, str):
        raise TypeError(f"it returned {described(reason)}; it should return None or the reason as text")
    return shortened(first_line(reason), _LONGEST_REASON) or "no reason given"


def _over(gate: str, value: float | None, limit: float) -> Iterator[ExceededLimit]:
    if value is not None and value > limit:
        yield ExceededLimit(gate, round(float(value), 3), limit)
