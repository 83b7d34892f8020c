"""Start of a run: its row in the ledger, its fencing token (epoch), and the cursor and history of earlier runs."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from peewee import fn

from housekeeping.core.clock import SYSTEM_CLOCK
from housekeeping.database.clock_skew import ClockSkew
from housekeeping.database.connection import database
from housekeeping.leases.fencing import Fence, next_epoch
from housekeeping.sweeps.ledger import run_queries, runs
from housekeeping.sweeps.ledger.models import NOW, Rejection, Run
from housekeeping.sweeps.ledger.runs import STOPPED, Counts, Cursor, Outcome, Resume, Trigger
from housekeeping.sweeps.stages.stage import Position

#: Number of past runs that make up a worker's history.
HISTORY: Final = 50
#: Reasons of runs that were stopped before their first change.
_REFUSED: Final = ("breaker", "clock")
#: Reasons after which the next run resumes. A run that its breaker limited has done its work, but the next one must not
#: begin with the same rows if they stay stale.
_RESUMED: Final = (*STOPPED, "breaker")


@dataclass(frozen=True, slots=True)
class PastRun:
    """Outcome and counts of an earlier run."""

    outcome: Outcome
    counts: Counts


@dataclass(frozen=True, slots=True)
class Attempt:
    """A run that has begun.

    Attributes:
      run_id: Id of its row in the ledger.
      started_at: Time of its start, by the database's clock.
      cursor: Where the run resumes; None to begin at the front.
      fence: Key, epoch and holder of its lease; None if it has no lease.
      history: The worker's last runs, newest first, without those that were stopped before their first change.
      clock_skew: How far this machine's clock is from the database's.
      rejected: Whether an earlier run of the worker with the same argument has left rejected rows.
      rejected_until: Where the last such run ended.
      heartbeat_at: The row's first heartbeat, as PostgreSQL writes it.
    """

    run_id: int
    started_at: datetime
    cursor: Cursor | None
    fence: Fence | None
    history: Sequence[PastRun]
    clock_skew: ClockSkew
    rejected: bool = False
    rejected_until: Position | None = None
    heartbeat_at: str | None = None


def begin(
    worker: str,
    *,
    message_id: str | None,
    tick: datetime | None,
    trigger: Trigger,
    lease: tuple[str, str] | None,
    resume: Resume = "interrupted",
    resumes: int | None = None,
    subject: str = "",
    counts: Counts | None = None,
) -> Attempt | None:
    """Begin a run, and close the rows of dead runs; None if its work was already done or taken over. One transaction.

    A run whose heartbeat is older than `SILENCE`, and any earlier run of this message, is considered dead. Its outcome
    becomes ``lost``, so that it cannot commit anything even if it was only suspended.

    Parameters:
      lease: Key and token of the run's lease, which gets an epoch.
      resume: Which earlier runs the new one resumes.
      resumes: The one run that the new one resumes, whatever its outcome, instead of the last one. Only one run can.
      subject: The run's argument as text.
      counts: Initial counts.
    """
    with database.atomic() as transaction:
        if message_id is not None:
            _lock_message(message_id)
        close_dead_runs(worker, message_id)
        # Only now: the update has waited for an earlier attempt that was committing its last batch.
        if message_id is not None and run_queries.completed(message_id):
            transaction.rollback()
            return None
        # In the row's transaction, so that every holder in the ledger has a run there. Before the history is read: this
        # waits for a holder that is committing its last batch and may end as done.
        fence = None if lease is None else Fence(lease[0], next_epoch(*lease), lease[1])
        last, rejected, rejected_until = _last_runs(worker, subject)
        if resumes is not None:
            # Locked, so that of two processes that resume it at the same time the second one sees the first.
            cursor = Run.select(Run.cursor).where(Run.id == resumes).for_update().scalar()
            if run_queries.resumed_by(resumes) is not None:
                transaction.rollback()
                return None
        else:
            cursor = _stopped_at(last[0], resume) if last else None
        before = SYSTEM_CLOCK.now()
        run_id, started_at, heartbeat_at = _insert(
            worker=worker,
            message_id=message_id,
            tick=tick,
            trigger=trigger,
            epoch=fence and fence.epoch,
            cursor=cursor,
            counts=counts or {},
        )
        skew = ClockSkew.between(before, started_at, SYSTEM_CLOCK.now())
        until = None if rejected_until is None else tuple(rejected_until)
        return Attempt(run_id, started_at, cursor, fence, _history(last), skew, rejected, until, heartbeat_at)


def past_runs(worker: str) -> list[PastRun]:
    """Return the worker's last runs, newest first, without those that were stopped before their first change."""
    return _history(_last_runs(worker, "")[0])


def close_dead_runs(worker: str, message_id: str | None = None) -> None:
    """Close the dead runs of a worker as ``lost``. They can no longer commit, even if only suspended.

    Parameters:
      message_id: All earlier runs of this message are dead as well.
    """
    silent = Run.heartbeat_at < NOW - runs.SILENCE
    dead = silent if message_id is None else silent | (Run.message_id == message_id)
    Run.update(outcome="lost", reason="taken_over", finished_at=NOW).where(
        (Run.worker == worker) & Run.outcome.is_null() & dead
    ).execute()


def _lock_message(message_id: str) -> None:
    """Lock the message id, so that two deliveries cannot both begin."""
    database.execute_sql("SELECT pg_advisory_xact_lock(hashtextextended(%s, 0))", (f"housekeeping run {message_id}",))


def _last_runs(
    worker: str, subject: str
) -> tuple[list[tuple[Outcome, str | None, Cursor | None, Counts]], bool, list[Any] | None]:
    """Return the worker's last runs, newest first, whether rows of the subject are rejected, and up to where."""
    rejected = Rejection.select(Rejection.position).where((Rejection.worker == worker) & (Rejection.subject == subject))
    until = rejected.order_by(Rejection.last_at.desc()).limit(1)
    was_not_refused = Run.reason.is_null() | Run.reason.not_in(_REFUSED) | (Run.outcome != "failed")
    rows: Any = (
        Run.select(Run.outcome, Run.reason, Run.cursor, Run.counts, fn.EXISTS(rejected), until)
        .where((Run.worker == worker) & ~(Run.outcome.in_(("skipped", "missed"))) & was_not_refused)
        .order_by(Run.id.desc())
        .limit(HISTORY)
        .tuples()
    )
    found = list(rows)
    return [row[:-2] for row in found], *(found[0][-2:] if found else (False, None))


def _history(last: Sequence[tuple[Outcome, str | None, Cursor | None, Counts]]) -> list[PastRun]:
    return [PastRun(outcome, counts) for outcome, *_, counts in last]


def _stopped_at(last: tuple[Outcome, str | None, Cursor | None, Counts], resume: Resume) -> Cursor | None:
    outcome, reason, cursor, _ = last
    if resume == "never":
        return None
    interrupted = outcome in ("lost", "lost_lease", "failed") or (outcome == "partial" and reason in _RESUMED)
    cut_short = resume == "cut_short" and outcome == "partial"
    return cursor if interrupted or cut_short else None


def record(
    worker: str,
    outcome: Outcome,
    reason: str,
    *,
    message_id: str | None,
    tick: datetime | None,
    trigger: Trigger,
    counts: Counts | None = None,
    traceback: str | None = None,
) -> tuple[int, datetime]:
    """Write the row of a run that never began (skipped, missed, failed), and return its id and time."""
    with database.atomic():
        run_id, at, _ = _insert(
            worker=worker,
            message_id=message_id,
            tick=tick,
            trigger=trigger,
            finished_at=NOW,
            outcome=outcome,
            reason=reason,
            counts=counts or {},
            traceback=traceback,
        )
    return run_id, at


def _insert(**columns: Any) -> tuple[int, datetime, str]:
    """Insert a row that begins now, and return its id, time and heartbeat."""
    process = {"host": socket.gethostname(), "pid": os.getpid()}
    row = Run.insert(started_at=NOW, heartbeat_at=NOW, **process, **columns).returning(
        Run.id, Run.started_at, Run.heartbeat_at.cast("text")
    )
    run_id, started_at, heartbeat_at = next(iter(row.tuples().execute()))
    return run_id, started_at, heartbeat_at
