"""Rejections in the schema `housekeeping`: what is rejected and since when, and which causes were reported lately."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final

from peewee import SQL, PeeweeException, fn

from housekeeping.core.sanitize import error_line, in_one_line
from housekeeping.core.telemetry.logs import logger as named_logger
from housekeeping.database.connection import database
from housekeeping.sweeps.ledger.models import NOW, Rejection, RejectionReport
from housekeeping.sweeps.stages.stage import Position, as_cursor

logger = named_logger(__name__)

#: A cause of a worker is reported again after this time at the earliest.
REPORTED_AGAIN_AFTER: Final = timedelta(hours=1)
#: Delay before a subject whose records were all rejected is scheduled again; doubles with each such run.
FIRST_DELAY: Final = timedelta(minutes=1)
LONGEST_DELAY: Final = timedelta(hours=1)
#: Causes that are kept for a worker and subject whose runs never look at everything.
_KEPT_CAUSES: Final = 50
_LONGEST_SUBJECT: Final = 200  # characters
_SHOWN: Final = 10  # causes of a worker in its status


@dataclass(frozen=True, slots=True)
class Rejected:
    """What a run rejected for one cause: how many records, and one of them with its error."""

    rows: int
    sample: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Standing:
    """What a worker's last run for a subject rejected for one cause.

    Attributes:
      argument: The run's argument; None for a worker without one.
      not_before: When the argument is scheduled again; None: at any time.
    """

    argument: str | None
    cause: str
    rows: int
    since: datetime
    last_at: datetime
    not_before: datetime | None
    sample: dict[str, Any]

    def as_json(self) -> dict[str, Any]:
        """One element of ``rejected`` in ``housekeeping status --json``."""
        return {
            "argument": self.argument,
            "cause": self.cause,
            "rows": self.rows,
            "since": self.since.isoformat(),
            "last_at": self.last_at.isoformat(),
            "not_before": self.not_before.isoformat() if self.not_before else None,
            "sample": self.sample,
        }


def subject_of(argument: Any) -> str:
    """Return a run's argument as it stands in the table."""
    return "" if argument is None else in_one_line(str(argument), _LONGEST_SUBJECT)


def record(
    worker: str,
    subject: str,
    found: Mapping[str, Rejected],
    *,
    whole: bool,
    settled_any: bool,
    position: Position | None,
) -> None:
    """Record what a run rejected by cause, and remove the causes that a whole run did not meet.

    One transaction.

    Parameters:
      whole: Whether the run looked at everything.
      settled_any: Whether the run settled a record. If it did not and has an argument, `not_before` moves on.
      position: Where the run ended.
    """
    ours = (Rejection.worker == worker) & (Rejection.subject == subject)
    before: Any = Rejection.select(Rejection.cause, Rejection.times).where(ours).tuples()
    standing: dict[str, int] = dict(list(before))
    gone = [cause for cause in standing if cause not in found] if whole else []
    times = 1 + max(standing.values(), default=0) if whole and subject and not settled_any else 0
    with database.atomic():
        if gone:
            Rejection.delete().where(ours & Rejection.cause.in_(gone)).execute()
        if found:
            _upsert(worker, subject, found, times, position)
        if len(found) + len(standing) - len(gone) > _KEPT_CAUSES:
            newest = Rejection.select(Rejection.cause).where(ours).order_by(Rejection.last_at.desc())
            Rejection.delete().where(ours & Rejection.cause.not_in(newest.limit(_KEPT_CAUSES))).execute()


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
        for cause in sorted(found)  # in one order, so that two runs do not wait for each other
    ]
    changed = [Rejection.last_at, Rejection.rows, Rejection.times, Rejection.not_before, Rejection.position]
    Rejection.insert_many(rows).on_conflict(
        conflict_target=[Rejection.worker, Rejection.subject, Rejection.cause], preserve=[*changed, Rejection.sample]
    ).execute()


def delay_after(times: int) -> timedelta:
    """Return how long a subject waits after so many runs in a row that rejected every record: 1 min to 1 h."""
    doubled: int = 2 ** min(times - 1, 10)
    return min(LONGEST_DELAY, FIRST_DELAY * doubled)


def due_for_report(worker: str, causes: Sequence[str]) -> set[str]:
    """Return the causes that were not reported within the last hour, and note that they are now.

    Asks this process's memory where the table cannot be reached.
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
        logger.warning("Reports are limited for this process only", error=error_line(error))
        return {cause for cause in causes if _memory.is_due(worker, cause)}


class _Memory:
    """The causes that this process has reported, for when the table cannot be reached."""

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
    """Return what is rejected, the most rows first, and how many more causes and arguments there are."""
    query: Any = (
        Rejection.select(Rejection, fn.COUNT(SQL("*")).over().alias("all_of_them"))
        .where(Rejection.worker == worker)
        .order_by(Rejection.rows.desc(), Rejection.since, Rejection.subject, Rejection.cause)
        .limit(_SHOWN)
    )
    rows = list(query)
    found = [
        Standing(row.subject or None, row.cause, row.rows, row.since, row.last_at, row.not_before, row.sample)
        for row in rows
    ]
    return found, (rows[0].all_of_them if rows else 0) - len(found)
