"""Tables of rejected records by cause, and of the last report of each cause."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timedelta
from typing import Any, Final

from peewee import SQL, PeeweeException, fn

from housekeeping.core.sanitize import error_line, in_one_line
from housekeeping.core.telemetry.logs import logger as named_logger
from housekeeping.database.connection import database
from housekeeping.sweeps.ledger.models import NOW, Rejection, RejectionReport, Run
from housekeeping.sweeps.stages.stage import Position, as_cursor

logger = named_logger(__name__)

#: Minimum interval between two reports of a worker's cause.
REPORTED_AGAIN_AFTER: Final = timedelta(hours=1)
#: Delay before an argument whose records were all rejected is scheduled again; doubles with each such run.
FIRST_DELAY: Final = timedelta(minutes=1)
LONGEST_DELAY: Final = timedelta(hours=1)
#: Causes kept for a worker and argument whose runs never reach the end.
_KEPT_CAUSES: Final = 50
_LONGEST_SUBJECT: Final = 200  # characters
_STATUS_CAUSES: Final = 10  # in a worker's status


@dataclass(frozen=True, slots=True)
class Rejected:
    """Rejected records of one cause: their number, and one of them with its error."""

    rows: int
    sample: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Standing:
    """Rejections of one cause by a worker's last run for an argument.

    Attributes:
      argument: The run's argument; None for a worker without one.
      not_before: When the argument may be scheduled again; None for any time.
    """

    argument: str | None
    cause: str
    rows: int
    since: datetime
    last_at: datetime
    not_before: datetime | None
    sample: dict[str, Any]

    def as_json(self) -> dict[str, Any]:
        """Return one element of ``rejected`` in ``housekeeping status --json``."""
        values = asdict(self).items()
        return {name: value.isoformat() if isinstance(value, datetime) else value for name, value in values}


def subject_of(argument: Any) -> str:
    """Return a run's argument as stored in the table."""
    return "" if argument is None else in_one_line(str(argument), _LONGEST_SUBJECT)


def record(
    worker: str,
    subject: str,
    found: Mapping[str, Rejected],
    *,
    complete: bool,
    delayed: bool,
    position: Position | None,
    run: tuple[int, Sequence[dict[str, Any]]] | None = None,
) -> None:
    """Record a run's rejections in one transaction, and remove causes that a complete run did not meet.

    Parameters:
      complete: Whether the run reached the end.
      delayed: Whether the run rejected every record, so that its argument is delayed by `not_before`.
      position: Where the run ended.
      run: Id of the run and what its row says about them; None to leave the row unchanged.
    """
    same_subject = (Rejection.worker == worker) & (Rejection.subject == subject)
    before: Any = Rejection.select(Rejection.cause, Rejection.times).where(same_subject).tuples()
    standing: dict[str, int] = dict(list(before))
    gone = [cause for cause in standing if cause not in found] if complete else []
    times = 1 + max(standing.values(), default=0) if delayed and subject else 0
    with database.atomic():
        if run is not None:
            Run.update(rejected=run[1]).where(Run.id == run[0]).execute()
        if gone:
            Rejection.delete().where(same_subject & Rejection.cause.in_(gone)).execute()
        if found:
            _upsert(worker, subject, found, times, position)
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
    """Return the delay after this many runs in a row that rejected every record: 1 min to 1 h."""
    doubled: int = 2 ** min(times - 1, 10)
    return min(LONGEST_DELAY, FIRST_DELAY * doubled)


def due_for_report(worker: str, causes: Sequence[str]) -> set[str]:
    """Return the causes not reported within the last hour, and mark them as reported.

    Without the database, this process remembers its own reports.
    """
    try:
        with database.atomic():
            noted = (
                RejectionReport.insert_many(
                    [{"worker": worker, "cause": cause, "reported_at": NOW} for cause in sorted(causes)]
                )
                .on_conflict(
                    conflict_target=[RejectionReport.worker, RejectionReport.cause],
                    preserve=[RejectionReport.reported_at],
                    where=RejectionReport.reported_at < NOW - REPORTED_AGAIN_AFTER,
                )
                .returning(RejectionReport.cause)
            )
            return {cause for (cause,) in noted.tuples().execute()}
    except PeeweeException as error:
        logger.warning("Could not read the reported causes", error=error_line(error))
        return {cause for cause in causes if _memory.is_due(worker, cause)}


class _Memory:
    """Causes reported by this process, used while the database does not answer."""

    _LARGEST: Final = 1000

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._reported: dict[tuple[str, str], float] = {}

    def is_due(self, worker: str, cause: str) -> bool:
        now = time.monotonic()
        with self._lock:
            last = self._reported.get((worker, cause))
            if last is not None and now - last < REPORTED_AGAIN_AFTER.total_seconds():
                return False
            self._reported.pop((worker, cause), None)
            self._reported[worker, cause] = now
            if len(self._reported) > self._LARGEST:
                del self._reported[next(iter(self._reported))]
        return True


_memory: Final = _Memory()


def standing(worker: str) -> tuple[list[Standing], int]:
    """Return the worker's rejections, most rows first, and the number of those beyond the first ten."""
    query: Any = (
        Rejection.select(Rejection, fn.COUNT(SQL("*")).over().alias("total"))
        .where(Rejection.worker == worker)
        .order_by(Rejection.rows.desc(), Rejection.since, Rejection.subject, Rejection.cause)
        .limit(_STATUS_CAUSES)
    )
    rows = list(query)
    shown = [
        Standing(row.subject or None, row.cause, row.rows, row.since, row.last_at, row.not_before, row.sample)
        for row in rows
    ]
    return shown, (rows[0].total if rows else 0) - len(shown)
