"""Backlogs of many workers: counted in one statement, and estimated by PostgreSQL's planner in another one.

If a statement fails, because one table is locked, slow or broken, its workers are read in groups, and those of a group
that fails one by one. So each failure is that of one worker, and the healthy ones cost one statement together.

`hint_of` finds whole partitions in a backlog.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final, TypeVar

from peewee import SQL, OperationalError, PeeweeException, Select

from housekeeping.core.errors import DeclarationError
from housekeeping.core.logs import error_line
from housekeeping.database.connection import LOCK_TIME, STATEMENT_TIME, database, time_limit
from housekeeping.database.errors import Kind, is_lock_timeout, is_timeout, is_unavailable, kind_of
from housekeeping.engine.alerts import DEFAULT_COUNT_LIMIT, Alert, first_of, late_alert, total_held, up_to
from housekeeping.engine.gates import LockGate
from housekeeping.ledger.history import RunRecord
from housekeeping.sweeps.actions import Delete
from housekeeping.sweeps.declaration import Sweep
from housekeeping.sweeps.partition_catalog import Partition, fails, read_partitions, reason_of_rows
from housekeeping.sweeps.partitions import PartitionStage
from housekeeping.sweeps.stage import Backlog, Stage
from housekeeping.sweeps.table_stage import TableStage, read_together
from housekeeping.sweeps.validate_tables import stages_of

T = TypeVar("T")

#: Workers of one statement. PostgreSQL allows 1,664 columns, and a worker may have several stages.
_TOGETHER: Final = 100
_HOUR: Final = timedelta(hours=1)
#: Smaller groups are not divided into groups again.
_SMALL: Final = 10
#: Interval at which the oldest rows are read again while no run ends.
_INTERVAL: Final = timedelta(minutes=5)
#: Worker -> its promise and the end of its last run, when its rows were read, and the alert.
_late: Final[dict[str, tuple[tuple[timedelta | None, datetime], datetime, Alert | None]]] = {}


@dataclass(frozen=True, slots=True)
class Counted:
    """The stale rows of a worker.

    Attributes:
      waiting: Their number, counted up to a limit.
      oldest: The first order column of the oldest one; None without stale rows.
      held: The stale rows that stay because they are on hold; None if the worker has no hold.
    """

    waiting: Backlog
    oldest: Any
    held: Backlog | None


def count_backlogs(sweeps: Sequence[Sweep], now: datetime, until: float) -> dict[str, Counted | Exception]:
    """Count the stale rows of each worker, or return why they could not be counted.

    Parameters:
      until: Time of the monotonic clock after which no further statement begins.

    Raises:
      peewee.PeeweeException: The database does not answer.
    """
    return _read_apart(sweeps, lambda some: _count(some, now), until)


def planned_rows(
    sweeps: Sequence[Sweep], now: datetime, until: float = math.inf
) -> dict[str, tuple[int, int] | Exception]:
    """Return the planner's estimates of the rows that are stale now, and of those that were an hour ago.

    A worker with another stage than those of tables has no estimate.

    Raises:
      peewee.PeeweeException: The database does not answer.
    """
    return _read_apart(sweeps, lambda some: _estimate(some, now), until)


def known_late_alert(sweep: Sweep, ended_at: datetime | None, now: datetime) -> Alert | None:
    """Return `late_alert` from a cache, which is read again after each run and every five minutes, in limited time.

    Parameters:
      ended_at: When the worker's last run ended; None before the first one, when nothing is cached.
    """
    if sweep.alerts.late is None:
        return None
    key, known = (sweep.alerts.late, ended_at or now), _late.get(sweep.name)
    is_old = known is None or known[0] != key or not timedelta() <= now - known[1] < _INTERVAL
    if known is None or is_old or ended_at is None:
        with time_limit(STATEMENT_TIME, LOCK_TIME):
            known = _late[sweep.name] = key, now, late_alert(sweep, now)
    return known[2]


def _read_apart(
    sweeps: Sequence[Sweep], read: Callable[[Sequence[Sweep]], dict[str, T]], until: float
) -> dict[str, T | Exception]:
    found: dict[str, T | Exception] = {}
    joined = [sweep for sweep in sweeps if all(map(_can_be_joined, sweep.known_stages()))]
    alone = [[sweep] for sweep in sweeps if not all(map(_can_be_joined, sweep.known_stages()))]
    groups = [*_divided(joined, _TOGETHER), *alone]
    while groups:
        group = groups.pop(0)
        try:
            if time.monotonic() >= until:
                raise TimeoutError("the other workers' tables took too long")
            with time_limit(STATEMENT_TIME, LOCK_TIME):
                found |= read(group)
        except Exception as error:  # a predicate may raise anything
            if is_unavailable(error):
                raise
            if len(group) == 1 or isinstance(error, TimeoutError):
                found |= dict.fromkeys((sweep.name for sweep in group), error)
            else:
                groups += _divided(group, math.isqrt(len(group)) if len(group) > _SMALL else 1)
    return found


def _can_be_joined(stage: Stage) -> bool:
    """Return whether the stage counts as a table does. Others send statements of their own."""
    own, of_table = type(stage), TableStage
    return isinstance(stage, TableStage) and (own.backlog, own.oldest) == (of_table.backlog, of_table.oldest)


def _divided(sweeps: Sequence[Sweep], size: int) -> list[Sequence[Sweep]]:
    return [sweeps[start : start + size] for start in range(0, len(sweeps), size)]


def _count(sweeps: Sequence[Sweep], now: datetime) -> dict[str, Counted]:
    limits = {sweep.name: sweep.alerts.backlog or DEFAULT_COUNT_LIMIT for sweep in sweeps}
    stages = {sweep.name: sweep.stages_for_run() for sweep in sweeps}
    probes = [
        each.probes(now, limits[name]) if isinstance(each, TableStage) and _can_be_joined(each) else []
        for name, own in stages.items()
        for each in own
    ]
    answers, found = iter(read_together(probes)), dict[str, Counted]()
    for name, own in stages.items():
        waiting, oldest, held = Backlog(0), list[Any](), list[Backlog | None]()
        for stage in own:
            rows, first, *on_hold = next(answers) or (stage.backlog(now, limits[name]), stage.oldest(now))
            waiting += rows
            oldest.append(first)
            held += on_hold
        found[name] = Counted(up_to(limits[name], waiting), first_of(oldest), total_held(held))
    return found


def _estimate(sweeps: Sequence[Sweep], now: datetime) -> dict[str, tuple[int, int]]:
    """Read the estimates of all workers from one plan. Each predicate is a subquery of it, which is not executed."""
    queries, shares = list[Any](), dict[str, int]()
    for sweep in sweeps:
        stages = stages_of(sweep)
        if all(isinstance(each, TableStage) for each in stages):
            shares[sweep.name] = len(stages)
            queries += (
                stage.model.select(SQL("1")).where(stage.stale(at))
                for at in (now, now - _HOUR)
                for stage in stages
                if isinstance(stage, TableStage)
            )
    if not queries:
        return {}
    sql, parameters = database.get_sql_context().sql(Select(columns=queries)).query()
    plan: Any = database.execute_sql(f"EXPLAIN (FORMAT JSON) {sql}", parameters).fetchone()[0]
    rows = iter([each["Plan Rows"] for each in plan[0]["Plan"]["Plans"]])
    return {
        name: (sum(next(rows) for _ in range(share)), sum(next(rows) for _ in range(share)))
        for name, share in shares.items()
    }


#: Partitions that a hint looks at, the oldest ones.
_EXAMINED: Final = 12
#: Time limit for one partition, whose rows are read unless an index or its bounds answer.
_TIME_LIMIT: Final = timedelta(seconds=1)
_NOT_STALE: Final = "a row is not stale"


def hint_of(stage: Stage, now: datetime) -> str | None:
    """Return a hint about the partitions of the table; None if there is none.

    For a plain `Delete`, the hint names partitions that could be dropped instead of deleting their rows. For a stage
    that drops partitions and has read them, it warns if no partition follows the current one. Requires a transaction,
    and leaves it usable.
    """
    if isinstance(stage, PartitionStage):
        return stage.table.warning(now)
    if not isinstance(stage, TableStage) or type(stage.action) is not Delete or stage.action.archive_to is not None:
        return None
    try:
        found = list(_stale_partitions(stage, now))
    except DeclarationError:  # not partitioned, or not by ranges of time
        return None
    if not found:
        return None
    size = f"{sum(each.bytes for each in found):,} bytes"
    if len(found) == 1:
        return f"every row of the partition {found[0].name} is stale ({size}), so that DropPartitions could drop it"
    number = f"{'' if len(found) < _EXAMINED else 'at least '}{len(found)} partitions"
    names = f"{found[0].name} to {found[-1].name}"
    return f"every row of {number} is stale ({names}, {size}), so that DropPartitions could drop them"


def _stale_partitions(stage: TableStage, now: datetime) -> Iterator[Partition]:
    """Yield the oldest partitions with rows that could be dropped, up to the first that is not stale as a whole."""
    table = read_partitions(stage.model)
    condition = fails(stage.stale(now), table.column)
    filled = [
        each for each in table.partitions if table.is_older(each, now) and each.rows != 0 and each.state == "attached"
    ]
    for partition in filled[:_EXAMINED]:
        try:
            with time_limit(_TIME_LIMIT):
                reason = reason_of_rows(stage.model, partition, {_NOT_STALE: condition})
        except OperationalError as error:
            if not is_timeout(error):
                raise
            return
        if reason == _NOT_STALE:
            return
        if reason is None:
            yield partition


def why_uncounted(sweep: Sweep, now: datetime, error: Exception) -> str:
    """Return the error with the session that locks the table, or with the command that finds the failing row."""
    if is_lock_timeout(error):
        with suppress(PeeweeException), time_limit(STATEMENT_TIME, LOCK_TIME):
            locks = LockGate(stages_of(sweep), now).examine()
            if locks.reason is not None:
                return locks.text
        return f"{error_line(error)}; to see which session holds the lock: housekeeping doctor --database"
    if is_timeout(error):
        return f"{error_line(error)}; to see whether an index is missing: housekeeping doctor"
    if isinstance(error, PeeweeException) and kind_of(error) is Kind.ROW:
        return f"{error_line(error)}; housekeeping plan {sweep.name} looks for the row"
    return error_line(error)


def last_counted(ended: Sequence[RunRecord]) -> tuple[Backlog | None, datetime | None]:
    """Return the last backlog in the ledger, and when it was counted."""
    for run in reversed(ended):
        if run.backlog is not None:
            return Backlog(run.backlog, exact=bool(run.backlog_exact)), run.finished_at
    return None, None
