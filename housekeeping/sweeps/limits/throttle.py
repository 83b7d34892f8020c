"""ThrottleLimits: throttles that slow a run down while the database is not well, and end it early when that lasts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, Final

from housekeeping.core.clock import RunBudget
from housekeeping.core.telemetry.logs import logger as named_logger
from housekeeping.sweeps.checks.field_types import refuse_wrong_types
from housekeeping.sweeps.limits.db_health import POSTGRES_HEALTH, DbHealth, HealthSource

logger = named_logger(__name__)

_EVERY_S: Final = 2.0  # the signs change no faster than a person would act
_FIRST_PAUSE_S: Final = 0.1
_LONGEST_PAUSE_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class ThrottleLimits:
    """What a run must not add to; it is slowed down above these limits. Null, or false, switches a gate off.

    Attributes:
      replication_lag_s: Seconds a standby is behind. 30: a healthy one lags by less than a second, and who reads from
        it notices half a minute.
      waiting_locks: Sessions that wait for locks on the sweep's tables. 10: single ones come and go with any traffic,
        a queue of ten means a migration or a hot row, which we would hold up.
      vacuum: Whether a vacuum of the tables shuts. Off: it is the ordinary companion of every cleaning.
      batch_s: Seconds our own batches took since the last look, on average. Off: what is slow differs by table.
      wait_s: How long a run waits to begin; then, or in the middle, how long it goes slowly before it ends. It always
        takes one batch.
    """

    replication_lag_s: float | None = 30
    waiting_locks: int | None = 10
    vacuum: bool = False
    batch_s: float | None = None
    wait_s: float = 10

    def __post_init__(self) -> None:
        refuse_wrong_types("ThrottleLimits", self)

    @property
    def ask(self) -> bool:
        """Whether there is anything to ask the database."""
        return self.replication_lag_s is not None or self.waiting_locks is not None or self.vacuum


@dataclass(frozen=True, slots=True)
class Shut:
    """A gate that is shut, and what shut it."""

    gate: str
    value: float
    limit: float


class Throttle:
    """Stands between the batches of one run.

    Parameters:
      tables: Those the sweep walks, as `health.table_name` has them; none: the database is not asked.
      budget: Its time is what is waited by.
      wait: Waits for so many seconds, or until the run is to stop.
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
        self._health = health or POSTGRES_HEALTH
        self._asked_at: float | None = None
        self._shut: Shut | None = None
        self._shut_since = 0.0
        self._pause_s = 0.0
        self._begun = False
        self._batches: list[float] = []
        self._unknown: set[str] = set()

    @property
    def measures(self) -> bool:
        """Whether it is to be told how long batches take."""
        return self._limits.batch_s is not None

    @property
    def is_active(self) -> bool:
        """Whether a gate was shut when they were last looked at."""
        return self._shut is not None

    def took(self, seconds: float) -> None:
        """Hear how long a batch took."""
        self._batches.append(seconds)

    def hold(self, give_up: Callable[[], bool]) -> Shut | None:
        """Let the next batch wait as long as it should; returns the gate that makes the run end, None to go on.

        Before the first batch it waits for all gates to open. Between batches it only makes pauses, each longer than
        the one before: what was begun goes on, slowly. Asks at most every two seconds. A call after a
        throttled wait starts `wait_s` again.

        Parameters:
          give_up: Whether the run must end for another reason; asked while it waits.
        """
        self._look()
        begun, self._begun = self._begun, True
        while self._shut is not None:
            if self._budget.seen - self._shut_since > self._limits.wait_s:
                return self._stays_shut(self._shut, begun)
            if give_up():
                return self._shut
            self._pause_s = min(_LONGEST_PAUSE_S, max(_FIRST_PAUSE_S, 2 * self._pause_s))
            self._wait(self._pause_s)
            self._budget.spent()
            self._look()
            if begun:
                break
        return None

    def as_count(self) -> dict[str, Any]:
        """The count ``throttled`` of a run that a gate ends, as the ledger keeps it; empty when none is shut."""
        shut = self._shut
        return {} if shut is None else {"throttled": {"gate": shut.gate, "value": shut.value, "limit": shut.limit}}

    def _stays_shut(self, shut: Shut, begun: bool) -> Shut:
        self._shut_since = self._budget.seen
        if begun:
            logger.warning("A gate stays shut", gate=shut.gate, value=shut.value, limit=shut.limit)
        else:
            logger.info("Throttled run works slowly", gate=shut.gate, value=shut.value, limit=shut.limit)
        return shut

    def _look(self) -> None:
        now = self._budget.seen
        if self._asked_at is not None and now - self._asked_at < _EVERY_S:
            return
        self._asked_at = now
        before, self._shut = self._shut, next(self._found(), None)
        self._batches.clear()
        if self._shut is None:
            self._pause_s = 0.0
        elif before is None:
            self._shut_since = now
            shut = self._shut
            logger.info("A gate is shut", gate=shut.gate, value=shut.value, limit=shut.limit)

    def _found(self) -> Iterator[Shut]:
        gates = self._limits
        signs = self._health.look(self._tables) if gates.ask and self._tables else None
        if signs is not None:
            lag, waiting = signs.replication_lag_s, signs.waiting_locks
            if gates.replication_lag_s is not None and self._known("replication_lag_s", lag, signs):
                yield from _over("replication_lag_s", lag, gates.replication_lag_s)
            if gates.waiting_locks is not None and self._known("waiting_locks", waiting, signs):
                yield from _over("waiting_locks", waiting, gates.waiting_locks)
            if gates.vacuum and self._known("vacuum", signs.vacuum, signs):
                yield from _over("vacuum", signs.vacuum, 0)
        if gates.batch_s is not None and self._batches:
            yield from _over("batch_s", fmean(self._batches), gates.batch_s)

    def _known(self, gate: str, value: float | None, signs: DbHealth) -> bool:
        if value is None and gate not in self._unknown:
            self._unknown.add(gate)
            logger.info("A gate is unknown and stands open", gate=gate, error=signs.trouble)
        return value is not None


def _over(gate: str, value: float | None, limit: float) -> Iterator[Shut]:
    if value is not None and value > limit:
        yield Shut(gate, round(float(value), 3), limit)
