"""Failures of rows: which of them are at fault, how a run passes them, and what is recorded about them.

`Bisection` finds the rows that make a batch fail. `Rejections` groups the rows that failed by their cause: each cause
has a few log lines, one report and one row in the ledger.
"""

from __future__ import annotations

import json
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, Final, Generic, TypeVar

from peewee import PeeweeException

from housekeeping.core.errors import HandlerFailed, RowNotChanged
from housekeeping.core.logs import error_line, in_one_line, shortened, to_log_value
from housekeeping.core.logs import logger as named_logger
from housekeeping.core.telemetry import report
from housekeeping.core.threads import free_after_fork
from housekeeping.database.connection import database, shorten_time_limits
from housekeeping.database.errors import (
    Kind,
    cause_of,
    innermost,
    is_of_statement_alone,
    is_raised,
    is_timeout,
    kind_of,
)
from housekeeping.ledger.schema import NOW, Rejection, Run
from housekeeping.sweeps.stage import BatchResult, Failure, Position, as_cursor

T = TypeVar("T")

logger = named_logger(__name__)

#: Seconds that a part of a batch has once the whole batch has timed out: a healthy one needs milliseconds.
_PART_S: Final = 2.0
#: Seconds that a single row has then.
_ROW_S: Final = 5.0
#: Seconds that a part or a row may then wait for a lock.
_LOCK_S: Final = 0.25
#: Seconds after which the rest of a bisected batch is left to the next run. The run's budget (30 s for the
#: shortest built-in workers), a statement_timeout of 30 s and these 45 s stay below the actor's time limit of 120 s.
BISECTION_S: Final = 45.0

_ROW_KINDS: Final = (Kind.ROW, Kind.STATEMENT, Kind.TIMEOUT)

#: Minimum interval between two reports of a worker's cause by one process.
REPORTED_AGAIN_AFTER: Final = timedelta(hours=1)
#: Delay before an argument whose run failed, or rejected every record, is scheduled again; doubles with each such run.
FIRST_DELAY: Final = timedelta(minutes=1)
LONGEST_DELAY: Final = timedelta(hours=1)
#: Causes kept for a worker and argument whose runs never reach the end.
_KEPT_CAUSES: Final = 50
_STATUS_CAUSES: Final = 10  # in a worker's status
LINES: Final = 20  # records of a cause that have a log line of their own in a run
SAMPLES: Final = 5  # records of a cause in its report
CAUSES: Final = 20  # distinct causes of a run, which bounds its memory, log lines and reports
OTHER_CAUSES: Final = "other causes"
_LONGEST_VALUE: Final = 300  # characters of a value in a log line, report or row
_LONGEST_ROW: Final = 50_000  # characters of all records in the row of a run


def is_row_error(error: BaseException) -> bool:
    """Return whether a single row can have caused the error: any error that leaves the connection usable.

    The others (a lost connection, a read-only server, a full disk, a deadlock) concern the whole run. An error that a
    trigger raises with such a code may be that of a single row.
    """
    if isinstance(error, PeeweeException):
        return kind_of(error) in _ROW_KINDS or is_raised(error)
    return isinstance(error, HandlerFailed | RowNotChanged)


def may_concern_all_rows(error: BaseException, *, has_changed_rows: bool) -> bool:
    """Return whether a row error may be that of every row: a slow database, or a statement that is wrong by itself.

    Parameters:
      has_changed_rows: Whether the statement has changed rows in this run, so that its triggers are right for some.
    """
    if not isinstance(error, PeeweeException) or kind_of(error) is Kind.ROW:
        return False
    # A right, a column or a table may also be gone since the rows were changed.
    return kind_of(error) is not Kind.STATEMENT or not has_changed_rows or is_of_statement_alone(error)


class NoRowSucceeded(Exception):
    """All rows that were probed failed."""


class Bisection(Generic[T]):
    """The parts of a batch that failed, in the order in which to try them.

    A batch that failed with an error is split in halves, front to back. If the error may concern all rows, the batch
    is probed first: its first, middle and last row, each alone. If all three fail, no row counts as failed. If not, the
    others are split: after a timeout, into parts that should take a second, and what times out again is tried after
    everything else. Of three rows or fewer, each counts as a bad row, unless no code of a trigger was running: then
    the statement itself lacks a right or a table.

    Parameters:
      items: The rows of the batch.
      error: What it failed with.
      probes: Whether the error may concern all rows.

    Attributes:
      timed_out: Whether something timed out, so that `shorten_timeouts` applies to each part.
      part_size: The largest part that should not time out.
      any_succeeded: Whether a part was processed.
    """

    def __init__(self, items: Sequence[T], error: BaseException, *, probes: bool) -> None:
        self._began_at = self._part_began_at = time.monotonic()
        self._parts: deque[Sequence[T]] = deque()
        self._rest: Sequence[T] = ()
        self._bad: list[tuple[T, BaseException]] = []
        self.any_succeeded = False
        self._slowest_s = 0.0
        self._may_all_fail = False
        self.timed_out = is_timeout(error)
        self.part_size = max(1, len(items) // 2)
        if not probes:
            self._parts.extend(_halves(items) or ([items] if items else []))
            return
        places = dict.fromkeys((0, len(items) // 2, len(items) - 1)) if items else {}
        self._parts.extend([items[place]] for place in places)
        self._rest = [item for place, item in enumerate(items) if place not in places]
        self._may_all_fail = bool(self._rest) or is_of_statement_alone(error)

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
        self.any_succeeded = True
        if self._rest:
            self._slowest_s = max(self._slowest_s, time.monotonic() - self._part_began_at)

    def failed(self, part: Sequence[T], error: BaseException) -> None:
        """Record that the part failed.

        Raises:
          NoRowSucceeded: All rows that were probed failed.
          BaseException: `error` itself, when it is not a row's.
        """
        if not is_row_error(error):
            raise error
        if len(part) == 1:
            self._bad.append((part[0], error))
        if is_timeout(error):
            self.timed_out = True
            self._parts.extend(_halves(part))
        else:
            self._parts.extendleft(reversed(_halves(part)))
        if self._may_all_fail and not self._parts and not self.any_succeeded:
            raise NoRowSucceeded from error

    def bad_rows(self) -> list[tuple[T, BaseException]]:
        """Return the rows found to be bad since the last call; none while they are the only ones that were probed."""
        if self._may_all_fail and not self.any_succeeded:
            return []
        found, self._bad = self._bad, []
        return found

    def took_too_long(self) -> bool:
        """Return whether the batch has been bisected for long enough."""
        return time.monotonic() - self._began_at > BISECTION_S


def _halves(part: Sequence[T]) -> list[Sequence[T]]:
    """Return both halves of a part; none of a single row."""
    middle = len(part) // 2
    return [part[:middle], part[middle:]] if middle else []


def shorten_timeouts(rows: int) -> None:
    """Lower the timeouts of the open transaction to the time allowed for a part of this many rows."""
    shorten_time_limits(timedelta(seconds=_ROW_S if rows == 1 else _PART_S), timedelta(seconds=_LOCK_S))


@dataclass(frozen=True, slots=True)
class Rejected:
    """Rejected records of one cause: their number, and one of them with its error. The number is 0 for a failed run."""

    rows: int
    sample: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Standing:
    """Rejections of one cause by a worker's last run for an argument.

    Attributes:
      argument: The run's argument; None for a worker without one.
      rows: The number of records; 0 if the run failed.
      not_before: When the argument may be scheduled again; None for any time.
    """

    argument: str | None
    cause: str
    rows: int
    since: datetime
    last_at: datetime
    not_before: datetime | None
    sample: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Failing:
    """An argument whose last runs failed or rejected every record, and the cause of the last one."""

    argument: str
    runs: int
    since: datetime
    cause: str


def record(
    worker: str,
    subject: str,
    found: Mapping[str, Rejected],
    *,
    complete: bool,
    delayed: bool,
    position: Position | None,
    worked: bool = False,
    run: tuple[int, Sequence[dict[str, Any]]] | None = None,
) -> None:
    """Record a run's rejections in one transaction, and remove causes that a complete run did not meet.

    Parameters:
      complete: Whether the run reached the end.
      delayed: Whether the run failed or rejected every record, so that its argument is delayed by `not_before`.
      worked: Whether the run processed records and did not fail, which ends the failures of earlier runs.
      position: Where the run ended.
      run: Id of the run and what its row says about them; None to leave the row unchanged.
    """
    same_subject = (Rejection.worker == worker) & (Rejection.subject == subject)
    before: Any = Rejection.select(Rejection.cause, Rejection.times, Rejection.rows).where(same_subject).tuples()
    standing = {cause: (times, rows) for cause, times, rows in before}
    gone = [
        cause for cause, (_, rows) in standing.items() if cause not in found and (complete or (worked and rows == 0))
    ]
    kept = [cause for cause in standing if cause not in found and cause not in gone]
    times = 1 + max((times for times, _ in standing.values()), default=0) if delayed and subject else 0
    with database.atomic():
        if run is not None:
            Run.update(rejected=run[1]).where(Run.id == run[0]).execute()
        if gone:
            Rejection.delete().where(same_subject & Rejection.cause.in_(gone)).execute()
        if found:
            _upsert(worker, subject, found, times, position)
        if kept:
            # All causes of an argument have its number of runs, and its delay.
            not_before = NOW + delay_after(times) if times else None
            Rejection.update(times=times, not_before=not_before).where(
                same_subject & Rejection.cause.in_(kept)
            ).execute()
        if len(found) + len(standing) - len(gone) > _KEPT_CAUSES:
            newest = Rejection.select(Rejection.cause).where(same_subject).order_by(Rejection.last_at.desc())
            Rejection.delete().where(same_subject & Rejection.cause.not_in(newest.limit(_KEPT_CAUSES))).execute()


def _upsert(worker: str, subject: str, found: Mapping[str, Rejected], times: int, position: Position | None) -> None:
    rows = [
        {
            "worker": worker,
            "subject": subject,
            "cause": cause,
            "since": NOW,
            "last_at": NOW,
            "rows": found[cause].rows,
            "times": times,
            "not_before": NOW + delay_after(times) if times else None,
            "position": as_cursor(position),
            "sample": found[cause].sample,
        }
        for cause in sorted(found)  # the same order in every run, against deadlocks
    ]
    changed = [Rejection.last_at, Rejection.rows, Rejection.times, Rejection.not_before, Rejection.position]
    Rejection.insert_many(rows).on_conflict(
        conflict_target=[Rejection.worker, Rejection.subject, Rejection.cause], preserve=[*changed, Rejection.sample]
    ).execute()


def delay_after(times: int) -> timedelta:
    """Return the delay after this many runs in a row that failed or rejected every record: 1 min to 1 h."""
    doubled: int = 2 ** min(times - 1, 10)
    return min(LONGEST_DELAY, FIRST_DELAY * doubled)


#: Worker and cause -> when this process last reported it, by the monotonic clock.
reported_at: Final[dict[tuple[str, str], float]] = {}
_reporting: Final = free_after_fork(threading.Lock())
_MOST_REPORTED: Final = 1000


def due_for_report(worker: str, cause: str) -> bool:
    """Return whether this process has not reported the cause within the last hour, and mark it as reported."""
    now = time.monotonic()
    with _reporting:
        last = reported_at.get((worker, cause))
        if last is not None and now - last < REPORTED_AGAIN_AFTER.total_seconds():
            return False
        if len(reported_at) >= _MOST_REPORTED:
            reported_at.clear()  # the worst that this can do is a second report
        reported_at[worker, cause] = now
    return True


_FAILING: Final = """
SELECT * FROM (
    SELECT worker, subject, max(times), min(since), (array_agg(cause ORDER BY last_at DESC))[1],
        count(*) OVER of_worker, row_number() OVER (of_worker ORDER BY min(since), subject) AS place
    FROM {rejections} JOIN unnest(%s::text[], %s::integer[]) AS given (name, runs) ON worker = name
    WHERE subject <> '' AND times >= runs GROUP BY worker, subject WINDOW of_worker AS (PARTITION BY worker)
) AS found WHERE place <= %s ORDER BY worker, place
"""


def failing(runs: Mapping[str, int], limit: int) -> dict[str, tuple[list[Failing], int]]:
    """Return, by worker, the arguments with at least this many failed runs in a row, longest first, and their number.

    A run that rejected every record counts as failed.

    Parameters:
      limit: The most arguments of a worker.
    """
    found: dict[str, tuple[list[Failing], int]] = {}
    if not runs:
        return found
    sql = _FAILING.format(rejections=f'"{Rejection._meta.schema}".rejections')
    for worker, *failed, number, _ in database.execute_sql(sql, (list(runs), list(runs.values()), limit)).fetchall():
        found.setdefault(worker, ([], number))[0].append(Failing(*failed))
    return found


_STANDING: Final = """
SELECT * FROM (
    SELECT *, count(*) OVER of_worker AS total, row_number() OVER (
        of_worker ORDER BY rows = 0 DESC, rows DESC, since, subject, cause
    ) AS place
    FROM {rejections} WHERE worker = ANY(%s) WINDOW of_worker AS (PARTITION BY worker)
) AS found WHERE place <= %s ORDER BY worker, place
"""


def standing(workers: Sequence[str]) -> dict[str, tuple[list[Standing], int]]:
    """Return, by worker, ten of its rejections and the number of the others: failed runs first, then most rows."""
    found: dict[str, tuple[list[Standing], int]] = {}
    sql = _STANDING.format(rejections=f'"{Rejection._meta.schema}".rejections')
    rows: Any = Rejection.raw(sql, list(workers), _STATUS_CAUSES)
    for row in rows:
        shown, _ = found.setdefault(row.worker, ([], max(0, row.total - _STATUS_CAUSES)))
        shown.append(
            Standing(row.subject or None, row.cause, row.rows, row.since, row.last_at, row.not_before, row.sample)
        )
    return found


@dataclass(slots=True)
class _Group:
    """The records of one cause; `error` is that of the first."""

    error: BaseException
    rows: int = 0
    logged: int = 0
    samples: list[dict[str, Any]] = field(default_factory=list)

    def add(self, failure: Failure) -> None:
        self.rows += 1
        if len(self.samples) < SAMPLES:
            self.samples.append(short_record(failure.record))


@dataclass(slots=True)
class Rejections:
    """Records that a run could not process, or processed by a fallback after an error.

    Attributes:
      worker: The worker's name.
      run_id: The run's row in the ledger.
      subject: The run's argument as stored in the table.
    """

    worker: str
    run_id: int | None
    subject: str = ""
    _rejected: dict[str, _Group] = field(default_factory=dict, init=False)
    _rescued: dict[str, _Group] = field(default_factory=dict, init=False)

    def add(self, result: BatchResult) -> None:
        """Group the batch's rejected records, and log the first of each cause."""
        for failure in result.failures:
            group = _add(self._rejected, failure)
            if group.logged < LINES:
                group.logged += 1
                error = shortened(error_line(failure.error), _LONGEST_VALUE)
                logger.error("Record rejected", record=short_record(failure.record), error=error)
        for failure in result.rescued:
            _add(self._rescued, failure)

    def close(
        self,
        *,
        complete: bool,
        delayed: bool,
        rejected_before: bool,
        position: Position | None,
        worked: bool = False,
        failure: BaseException | None = None,
    ) -> bool:
        """Log, record and report each cause once; never raises. Return whether the run's failure was recorded.

        Parameters:
          complete: Whether the run reached the end. Recorded causes that it did not meet are then removed.
          delayed: Whether it rejected every record and was not interrupted.
          rejected_before: Whether an earlier run left rejections in the table.
          position: Where the run ended.
          worked: Whether it processed records and did not fail.
          failure: The error that ended the run and defers its argument; None without one. It has been reported.
        """
        for cause, group in self._rejected.items():
            if group.rows > group.logged:
                logger.error("More records rejected", cause=cause, rows=group.rows, logged=group.logged)
        is_recorded = False
        if self._rejected or failure is not None or ((complete or worked) and rejected_before):
            found = {
                cause: Rejected(group.rows, _storable(group.samples[0], group.error))
                for cause, group in self._rejected.items()
            }
            if failure is not None:
                found[cause_of(failure, {})] = Rejected(0, _storable({}, failure))
            groups = stored_groups(self._rejected)
            try:
                record(
                    self.worker,
                    self.subject,
                    found,
                    complete=complete,
                    delayed=delayed,
                    # An argument whose run failed stays deferred if there are new rows: they would fail as well.
                    position=None if failure is not None else position,
                    worked=worked,
                    run=(self.run_id, groups) if self.run_id is not None and groups else None,
                )
                is_recorded = failure is not None
            except PeeweeException as error:
                logger.warning("Could not record the rejections", error=error_line(error))
        groups_due = [(cause, group) for cause, group in self._rejected.items() if due_for_report(self.worker, cause)]
        # A record handled by the fallback does not fail again, so its report is not throttled.
        for cause, group in (*groups_due, *self._rescued.items()):
            about: dict[str, Any] = {"worker": self.worker, "run_id": self.run_id, "cause": cause}
            # Last, because a column of the record may have one of these names.
            about = {**group.samples[0], **about, "rows": group.rows, "samples": group.samples}
            report(group.error, **about)
        return is_recorded


def stored_groups(groups: Mapping[str, _Group]) -> list[dict[str, Any]]:
    """Return the causes of a run for its row: ``{"cause", "rows", "error", "records"}``.

    Records beyond the longest value that a row may have are left out; `rows` counts them.
    """
    stored, left = [], _LONGEST_ROW
    for cause, group in groups.items():
        records: list[dict[str, Any]] = []
        for sample in group.samples:
            record: dict[str, Any] = _printable(to_log_value(dict(sample)))
            left -= len(json.dumps(record))
            if left > 0:
                records.append(record)
        error = _printable(error_line(innermost(group.error)))
        stored.append({"cause": _printable(cause), "rows": group.rows, "error": error, "records": records})
    return stored


def _add(groups: dict[str, _Group], failure: Failure) -> _Group:
    cause = cause_of(failure.error, failure.record)
    if cause not in groups and len(groups) >= CAUSES:
        cause = OTHER_CAUSES
    group = groups.setdefault(cause, _Group(failure.error))
    group.add(failure)
    return group


def short_record(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the record with long values shortened."""
    return {name: _short(value) for name, value in record.items()}


def _short(value: Any) -> Any:
    if value is None or isinstance(value, int | float):
        return value
    text = value if isinstance(value, str) else str(to_log_value(value))
    # Short values keep their type, because log lines and error trackers format times and lists themselves.
    return value if len(text) <= _LONGEST_VALUE else shortened(text, _LONGEST_VALUE)


def _storable(sample: Mapping[str, Any], error: BaseException) -> dict[str, Any]:
    """Return the sample and its error as values for jsonb."""
    values = {"record": to_log_value(dict(sample)), "error": error_line(innermost(error))}
    stored: dict[str, Any] = _printable(values)
    return stored


def _printable(value: Any) -> Any:
    if isinstance(value, str):
        return in_one_line(shortened(value, _LONGEST_VALUE), _LONGEST_VALUE)
    if isinstance(value, dict):
        return {_printable(key): _printable(each) for key, each in value.items()}
    return [_printable(each) for each in value] if isinstance(value, list) else value
