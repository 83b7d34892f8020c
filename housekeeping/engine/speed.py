"""Speed of a run: how large its next batch is, how long it waits before it, and when a sick database slows it down.

`Speed` is the one brake of a run. It follows the worker's limits (rows per second, rest, target duration of a batch),
what an operator has narrowed, the time a batch took, and `ThrottleWatch`, which knows whether the database is well.

To add a check to the throttle, add its limit to the declaration's `Throttle`, its value to `DbHealth`, and both to
`ThrottleWatch._measured`. Operators set the limits by the key ``gates``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta
from statistics import fmean
from typing import Any, Final, Literal

from peewee import PeeweeException

from housekeeping.core.clock import Clock, RunBudget
from housekeeping.core.logs import described, error_line, first_line, shortened, typed_error_line
from housekeeping.core.logs import logger as named_logger
from housekeeping.core.settings import LARGEST_BATCH
from housekeeping.database.catalog import quoted_name
from housekeeping.database.connection import database
from housekeeping.engine.guard import processed_rows
from housekeeping.ledger.operators import Override
from housekeeping.ledger.runs import Counts
from housekeeping.sweeps.declaration import Sweep
from housekeeping.sweeps.partitions import PartitionStage
from housekeeping.sweeps.stage import Explainable, Resizable, Stage
from housekeeping.sweeps.table_stage import TableStage
from housekeeping.sweeps.values import Limits, Throttle

logger = named_logger(__name__)

#: Sizes of a batch, as parts and multiples of its stage's own size. They are few, because the statement of each one is
#: compiled and prepared once a run.
_PARTS: Final = (10, 5, 2)
_MULTIPLES: Final = (2, 5, 10, 20)
#: Target duration after a batch has timed out, if none is set.
_SHRUNK_TARGET: Final = timedelta(seconds=2)
_CHECK_INTERVAL_S: Final = 2.0  # seconds between two checks; health changes no faster than an operator acts
_FIRST_PAUSE_S: Final = 0.1
_LONGEST_PAUSE_S: Final = 1.0
_LONGEST_REASON: Final = 200  # characters
_MB: Final = 1024 * 1024  # bytes


class Speed:
    """Speed of one run.

    A batch that took longer than its target makes the next one of its stage a step smaller. One so quick that a step
    more would be in time makes it a step larger. Meanwhile a throttled run only shrinks, and so does one for whose
    locks another session waits.

    Parameters:
      stages: The run's stages, with the sizes of their first batches.
      budget: The run's time, which a narrowed worker has less of.
      ignores_pause: True for a run that was forced. It can still be stopped.

    Attributes:
      stopped: Why the run ends after its batch: an operator has paused the worker or stopped the run; None if neither.
      most_rows: Most rows of a batch by the rows per second: those of one second, so that the load is even; None for
        any number.
    """

    def __init__(
        self,
        sweep: Sweep,
        stages: Sequence[Stage],
        budget: RunBudget,
        clock: Clock,
        throttle: ThrottleWatch,
        *,
        ignores_pause: bool = False,
    ) -> None:
        self.throttle = throttle
        self.stopped: Literal["paused", "stopped"] | None = None
        self._own_rows_per_s, self._rest = sweep.limits.rows_per_s, sweep.limits.rest
        self._pace(None)
        self._progress_counts = sweep.progress_counts
        self._target = sweep.limits.batch_takes
        self._stages = stages
        self._sizes = [batch_sizes(each, sweep.limits) for each in stages]
        self._adapted = [each.batch_size for each in stages]
        self._used = list(self._adapted)
        #: Sizes that no batch exceeds, lowered while sessions wait for the run's locks.
        self._ceilings = [sizes[-1] for sizes in self._sizes]
        self._look_at: float | None = None
        self._knows_waiting = True
        self._shrunk: set[int] = set()
        self._narrowed: int | None = None
        self._resized: dict[tuple[int, int], Stage] = {}  # kept for the compiled statements of each stage
        self._budget = budget
        self._clock = clock
        self._ignores_pause = ignores_pause
        self._next_at: float | None = None

    def apply(self, override: Override | None) -> None:
        """Apply the operators' override from now on; None for the worker's own limits."""
        if self.stopped == "stopped":
            return  # it is not taken back
        narrow = override if override is not None and override.state == "narrow" else None
        self.stopped = None
        if override is not None and override.state == "stopped":
            logger.info("Run is stopped after its batch", user=override.said_by)
            self.stopped = "stopped"
        elif override is not None and override.state == "paused" and not self._ignores_pause:
            self.stopped = "paused"
        self._narrowed = narrow.batch_size if narrow else None
        self._pace(narrow.rows_per_s if narrow else None)
        self._budget.narrow(narrow.max_runtime if narrow else None)

    def _pace(self, narrowed: float | None) -> None:
        given = [each for each in (self._own_rows_per_s, narrowed) if each is not None]
        self._rows_per_s = min(given, default=None)
        self._is_paced = bool(given) or self._rest > 0
        self.most_rows = None if self._rows_per_s is None else max(1, int(self._rows_per_s))

    def next_stage(self, number: int, most: int | None = None) -> Stage:
        """Return a stage with the size of its next batch. A stage that cannot be resized stays as it is.

        Parameters:
          most: The most rows that the batch may have; None for any number.
        """
        if self.throttle.is_active and self._target_of(number) is not None:
            self._ease(number)
        stage = self._stages[number]
        limits = (self._adapted[number], self._narrowed, most)
        size = self._used[number] = min(each for each in limits if each is not None)
        if size == stage.batch_size:
            return stage
        if (number, size) not in self._resized:
            if isinstance(stage, Resizable):
                return stage.resized(size)  # may return the same stage, so it is not kept
            kind: Any = stage
            is_sized = dataclasses.is_dataclass(kind) and any(
                each.name == "batch_size" for each in dataclasses.fields(kind)
            )
            self._resized[number, size] = dataclasses.replace(kind, batch_size=size) if is_sized else stage
        return self._resized[number, size]

    @contextmanager
    def measured(self, number: int, counts: Callable[[], Counts]) -> Iterator[None]:
        """Measure the batch of the stage in the block: its duration, and the rows by the counts before and after."""
        target = self._target_of(number)
        if target is None and not (self._is_paced or self.throttle.measures):
            yield
            return
        before, began = counts(), self._clock.monotonic()
        yield
        now = self._clock.monotonic()
        took_s = now - began
        if self.throttle.measures:
            self.throttle.took(took_s)
        if self._is_paced:
            pause_s = self._rest * took_s
            if self._rows_per_s is not None:
                pause_s = max(pause_s, (self._tried(counts()) - self._tried(before)) / self._rows_per_s - took_s)
            self._next_at = now + pause_s
        if target is not None:
            self._adapt(number, took_s, target.total_seconds())

    def wait_s(self) -> float:
        """Return the seconds until the pace allows the next batch; 0 or less: now."""
        return 0.0 if self._next_at is None else self._next_at - self._clock.monotonic()

    def shrink(self, number: int, size: int) -> None:
        """Limit batches of the stage to `size` rows after a timeout, until they succeed and grow again."""
        self._adapted[number] = min(self._adapted[number], size)
        self._shrunk.add(number)

    def must_look(self, number: int) -> bool:
        """Return whether the next batch should call `look`, which needs a transaction of several statements."""
        if self._target_of(number) is None or not self._knows_waiting:
            return False
        now = self._clock.monotonic()
        if self._look_at is None:
            self._look_at = now + _CHECK_INTERVAL_S
        return now >= self._look_at

    def look(self, number: int) -> None:
        """Check, within the batch's transaction, whether other sessions wait for its locks, at most every two seconds.

        It cannot be checked between two batches, because the run then holds no locks.
        """
        if not self.must_look(number):
            return
        self._look_at = self._clock.monotonic() + _CHECK_INTERVAL_S
        try:
            with database.atomic():
                waiting = bool(database.execute_sql(_BLOCKS_OTHERS).fetchone()[0])
        except PeeweeException as error:
            self._knows_waiting = False
            logger.info("Whether sessions wait for the run's locks is unknown", error=error_line(error))
            return
        if waiting:
            self._ease(number)
            self._ceilings[number] = self._adapted[number]
            logger.info("Other sessions wait for the run's locks, batches shrink", rows=self._adapted[number])
        else:
            self._ceilings[number] = self._larger_than(number, self._ceilings[number])

    def _target_of(self, number: int) -> timedelta | None:
        """Return how long a batch of the stage should take; None if its batches do not adapt."""
        stage = self._stages[number]
        if not isinstance(stage, TableStage):
            return None
        target = self._target if stage.is_timed else None
        return target or (_SHRUNK_TARGET if number in self._shrunk else None)

    def _adapt(self, number: int, took_s: float, target_s: float) -> None:
        """Choose the size of the stage's next batch after one that took this long."""
        used, size = self._used[number], self._adapted[number]
        larger = min(self._larger_than(number, size), self._ceilings[number])
        if took_s > target_s:
            self._ease(number)
        elif used >= size < larger and took_s * larger <= target_s * used and not self.throttle.is_active:
            self._adapted[number] = larger

    def _ease(self, number: int) -> None:
        """Make the next batch of the stage a step smaller."""
        size = self._adapted[number]
        self._adapted[number] = next((each for each in reversed(self._sizes[number]) if each < size), size)

    def _larger_than(self, number: int, size: int) -> int:
        return next((each for each in self._sizes[number] if each > size), size)

    def _tried(self, counts: Counts) -> int:
        """Return the rows processed and failed."""
        names = self._progress_counts or [
            name for name, value in counts.items() if name != "batches" and type(value) is int
        ]
        return processed_rows(counts, [*dict.fromkeys((*names, "failed"))])


def batch_sizes(stage: Stage, limits: Limits) -> tuple[int, ...]:
    """Return the sizes that batches of a stage may have, in order. Its own size is that of the first batch.

    Without a target duration, batches shrink only after a timeout.
    """
    own = stage.batch_size
    if not isinstance(stage, TableStage):
        return (own,)
    grows = limits.batch_takes is not None and stage.is_timed and not stage.calls_handlers()
    larger = [own * each for each in _MULTIPLES if own * each < LARGEST_BATCH] if grows else []
    most = [LARGEST_BATCH] if grows and own * _MULTIPLES[-1] >= LARGEST_BATCH else []
    return tuple(sorted({*(max(1, own // each) for each in _PARTS), own, *larger, *most}))


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


class ThrottleWatch:
    """Throttle of one run, called between its batches.

    Parameters:
      tables: Tables of the sweep, by `table_name`; empty: the database is not queried.
      budget: Clock for the waiting time.
      wait: Sleeps for this many seconds, or until the run must stop.
    """

    def __init__(
        self,
        limits: Throttle,
        tables: Sequence[str],
        budget: RunBudget,
        wait: Callable[[float], object],
    ) -> None:
        self._limits = limits
        self._tables = tables
        self._budget = budget
        self._wait = wait
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
        return {} if self._exceeded is None else {"throttled": dataclasses.asdict(self._exceeded)}

    def _end_or_continue(self, exceeded: ExceededLimit, begun: bool) -> ExceededLimit:
        self._exceeded_since = self._budget.seen
        if begun:
            logger.warning("Still throttled, ending the run", **dataclasses.asdict(exceeded))
        else:
            logger.info("Throttled run continues slowly", **dataclasses.asdict(exceeded))
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
            logger.info("Run is throttled", **dataclasses.asdict(self._exceeded))

    def _found(self) -> Iterator[ExceededLimit]:
        for gate, limit, value, trouble in self._measured():
            if limit is None:
                continue
            if value is None:
                self._log_unknown(gate, trouble)
            elif value > limit:
                yield ExceededLimit(gate, round(float(value), 3), limit)
        if self._limits.custom is not None and (reason := self._reason_of(self._limits.custom)) is not None:
            yield ExceededLimit("custom", reason, None)

    def _measured(self) -> Iterator[tuple[str, float | None, float | None, str | None]]:
        """Yield each check with its limit, its value, and why the value is unknown (None)."""
        limits = self._limits
        if self._tables and (limits.replication_lag_s, limits.waiting_locks, limits.vacuum) != (None, None, False):
            health = read_health(self._tables)
            yield "replication_lag_s", limits.replication_lag_s, health.replication_lag_s, health.trouble
            yield "waiting_locks", limits.waiting_locks, health.waiting_locks, health.trouble
            yield "vacuum", 0 if limits.vacuum else None, health.vacuum, health.trouble
        if self._batches:
            yield "batch_s", limits.batch_s, fmean(self._batches), None
        if (limits.wal_mb_per_s, limits.slot_lag_mb) != (None, None):
            wal = self._wal.look(self._budget.seen)
            if not self._wal.is_first:
                yield "wal_mb_per_s", limits.wal_mb_per_s, wal.mb_per_s, wal.trouble
            yield "slot_lag_mb", limits.slot_lag_mb, wal.slot_lag_mb, wal.trouble

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


def throttled_tables(stages: Sequence[Stage], now: datetime) -> list[str]:
    """Return the tables that the stages' statements use, quoted for SQL."""
    queries = [query for each in stages if isinstance(each, Explainable) for query in each.explain_queries(now)]
    models = {query.model for query in queries} | {each.model for each in stages if isinstance(each, PartitionStage)}
    dependents = {name for each in stages if (graph := getattr(each, "graph", None)) for name in graph.tables}
    return sorted({quoted_name(model) for model in models} | dependents)


@dataclass(frozen=True, slots=True)
class DbHealth:
    """Health signals at one moment; None if unknown.

    Attributes:
      replication_lag_s: Replay lag of the slowest standby in seconds; 0 without standbys. A consumer of a logical slot
        is no standby.
      waiting_locks: Sessions that wait for any lock while they hold or request one on the tables.
      vacuum: Whether a vacuum of one of the tables is running.
      trouble: Why nothing is known.
    """

    replication_lag_s: float | None = None
    waiting_locks: int | None = None
    vacuum: bool | None = None
    trouble: str | None = None


#: Looks at other sessions only if any waits: `pg_blocking_pids` stops the lock manager for a moment.
_BLOCKS_OTHERS: Final = """
SELECT coalesce(bool_or(CASE WHEN granted THEN false ELSE pg_backend_pid() = ANY (pg_blocking_pids(pid)) END), false)
FROM pg_locks
"""

#: One statement without locks of its own, because it runs while the database is overloaded. A role without pg_monitor
#: sees the rows of the two statistics views, but NULL in most of their columns.
_HEALTH: Final = """SELECT * FROM (
WITH RECURSIVE tables (id) AS (
    SELECT to_regclass(name)::oid FROM unnest(%s::text[]) AS name
    UNION SELECT inhrelid FROM tables JOIN pg_inherits ON inhparent = tables.id
), here AS (
    SELECT oid FROM pg_database WHERE datname = current_database()
), waiting AS (
    SELECT pid FROM pg_locks GROUP BY pid HAVING bool_or(NOT granted)
    AND bool_or(relation IN (SELECT id FROM tables) AND database = (SELECT oid FROM here))
)
SELECT
    (SELECT CASE WHEN count(*) > count(state) THEN NULL ELSE coalesce(max(extract(epoch FROM replay_lag)), 0) END
     FROM pg_stat_replication LEFT JOIN pg_replication_slots ON active_pid = pid
     WHERE slot_type IS DISTINCT FROM 'logical'),
    (SELECT count(*) FROM waiting),
    (SELECT CASE WHEN bool_or(relid IN (SELECT id FROM tables)) THEN true WHEN count(*) > count(relid) THEN NULL
     ELSE false END FROM pg_stat_progress_vacuum WHERE datid = (SELECT oid FROM here))
) AS health (lag, waiting, vacuum)
"""


def read_health(tables: Sequence[str]) -> DbHealth:
    """Return the health signals from PostgreSQL's statistics views, on the library's connection."""
    try:
        row: Any = database.execute_sql(_HEALTH, (list(tables),)).fetchone()
    except PeeweeException as error:
        return DbHealth(trouble=error_line(error))
    lag, waiting, vacuum = row
    return DbHealth(None if lag is None else float(lag), waiting, vacuum)


#: Both are NULL on a standby, which writes no WAL. A lost slot keeps none, nor does one without `restart_lsn`.
_WAL: Final = """SELECT * FROM (
WITH position AS (SELECT CASE WHEN NOT pg_is_in_recovery() THEN pg_current_wal_lsn() END AS lsn)
SELECT
    (SELECT pg_wal_lsn_diff(lsn, '0/0') FROM position),
    (SELECT CASE WHEN lsn IS NOT NULL THEN coalesce(max(pg_wal_lsn_diff(lsn, restart_lsn)), 0) END
     FROM position LEFT JOIN pg_replication_slots ON wal_status IS DISTINCT FROM 'lost' GROUP BY lsn)
) AS wal (position, slot_lag)
"""


@dataclass(frozen=True, slots=True)
class WalState:
    """WAL of the server at one moment; None if unknown.

    Attributes:
      position: Bytes written since the server was created.
      slot_lag_mb: Megabytes kept for the slowest replication slot; 0 without slots.
      trouble: Why nothing is known.
      mb_per_s: Megabytes written per second since the last look of a `WalRate`.
    """

    position: float | None = None
    slot_lag_mb: float | None = None
    trouble: str | None = None
    mb_per_s: float | None = None


def read_wal() -> WalState:
    """Return the server's current WAL state. Errors do not raise; the values are then None."""
    try:
        row: Any = database.execute_sql(_WAL).fetchone()
    except PeeweeException as error:
        return WalState(trouble=error_line(error))
    position, slot_lag = (None if value is None else float(value) for value in row)
    return WalState(position, None if slot_lag is None else slot_lag / _MB)


class WalRate:
    """Rate at which WAL is written between two looks.

    Attributes:
      is_first: Whether there was at most one look, so that there is no rate yet.
    """

    def __init__(self) -> None:
        self._last: tuple[float, float | None] | None = None
        self.is_first = True

    def look(self, now: float) -> WalState:
        """Return the WAL written per second since the last call, and the WAL kept for slots.

        Parameters:
          now: Seconds on a monotonic clock.
        """
        state, last = read_wal(), self._last
        self._last, self.is_first = (now, state.position), last is None
        if last is None or state.position is None or last[1] is None or now <= last[0]:
            return state
        # After a failover the position can be lower.
        return dataclasses.replace(state, mb_per_s=max(0.0, state.position - last[1]) / (now - last[0]) / _MB)
