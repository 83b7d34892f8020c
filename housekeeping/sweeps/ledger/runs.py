"""The run ledger: one row an attempt, written in the same transaction as the work it counts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final, Literal

from peewee import Expression, Query, fn

from housekeeping.core.clock import SYSTEM_CLOCK
from housekeeping.core.errors import LeaseLost, RunTakenOver
from housekeeping.database.clock_skew import ClockSkew
from housekeeping.database.compiled_query import Parameter, QueryCache
from housekeeping.database.connection import database
from housekeeping.leases.fencing import next_epoch
from housekeeping.sweeps.ledger.models import NOW, Lease, Rejection, Run, Switch
from housekeeping.sweeps.ledger.overrides import Override

Trigger = Literal["schedule", "enqueue", "cli", "parent"]
Outcome = Literal["done", "partial", "skipped", "failed", "lost_lease", "lost", "missed"]
#: From where a run begins: always the front; where a run stopped that broke off; or that was cut short by its limits.
Resume = Literal["never", "interrupted", "cut_short"]
Counts = dict[str, Any]
#: Which pass a run was in, and after which record: ``{"pass": ..., "after": [...]}``.
Cursor = dict[str, Any]

#: How often a run says that it lives, at the least; each batch says so too.
HEARTBEAT: Final = timedelta(seconds=20)
#: Three missed heartbeats and a run is taken for dead (design.md, State in PostgreSQL).
SILENCE: Final = 3 * HEARTBEAT
#: Runs that a worker's history is told by.
HISTORY: Final = 50
#: Reasons of runs that were stopped before their first change.
REFUSED: Final = ("breaker", "clock")
#: Ways to end early at which nothing is wrong with the place: the next run goes on there.
STOPPED: Final = ("shutdown", "paused", "gate")
#: The next run goes on where one ended for these reasons. A run that its breaker limited has done its work, but the
#: next one must not meet the same rows again where they stay stale.
_GO_ON: Final = (*STOPPED, "breaker")

#: What operators say of the run's worker, in the statement that writes the run's row: it costs no round trip.
_SAID: Final = Switch.select(fn.JSONB_BUILD_ARRAY(Switch.state, Switch.batch_size, Switch.max_runtime_s)).where(
    (Switch.worker == Run.worker) & (Switch.until.is_null() | (Switch.until > NOW))
)


@dataclass(frozen=True, slots=True)
class PastRun:
    """A run that ended before this one, as far as it tells what is usual."""

    outcome: Outcome
    counts: Counts


@dataclass(frozen=True, slots=True)
class Attempt:
    """What a run is told when it begins.

    Attributes:
      run_id: Its row.
      started_at: By the database's clock.
      cursor: Where an interrupted run before it stopped; null: start at the front.
      epoch: Of its lease; null: it has none.
      history: The worker's last runs, the newest first, without those that a breaker stopped before their first
        change.
      clock_skew: How far this machine's clock is from the database's.
      rejected: Whether records stand rejected since an earlier run of the worker for the same subject.
    """

    run_id: int
    started_at: datetime
    cursor: Cursor | None
    epoch: int | None
    history: Sequence[PastRun]
    clock_skew: ClockSkew
    rejected: bool = False


@dataclass(frozen=True, slots=True)
class Closed:
    """How a run's row stands that is closed."""

    outcome: Outcome
    reason: str | None
    counts: Counts


def begin(
    worker: str,
    *,
    message_id: str | None,
    tick: datetime | None,
    trigger: Trigger,
    lease: tuple[str, str] | None,
    resume: Resume = "interrupted",
    subject: str = "",
    counts: Counts | None = None,
) -> Attempt | None:
    """Open a run's row, after closing those of runs that died; None when this message was already completed.

    A run whose heartbeat is older than `SILENCE`, and any earlier run of this very message, is
    taken for dead: its outcome becomes ``lost``, so that it can commit nothing more even if it
    was only asleep. One transaction.

    Parameters:
      lease: The key and the token of the lease the run holds; gives it an epoch.
      resume: Which runs before it the new one goes on from.
      subject: The run's argument, as `rejections` has it.
      counts: Counts that the row starts with; None: no counts.
    """
    with database.atomic() as transaction:
        if message_id is not None:
            _alone_with(message_id)
        silent = Run.heartbeat_at < NOW - SILENCE
        dead = silent if message_id is None else silent | (Run.message_id == message_id)
        Run.update(outcome="lost", reason="taken_over", finished_at=NOW).where(
            (Run.worker == worker) & Run.outcome.is_null() & dead
        ).execute()
        # Not before: that waits for an earlier attempt that is just committing its last batch.
        if message_id is not None and completed(message_id):
            transaction.rollback()
            return None
        # With the row, in one transaction: a lease whose holder stands in the ledger has a run there. Before the runs
        # are looked at: it waits for a holder that is just committing its last batch, and may end as done by that.
        epoch = None if lease is None else next_epoch(*lease)
        last, rejected = _last_runs(worker, subject)
        cursor = _stopped_at(last[0], resume) if last else None
        before = SYSTEM_CLOCK.now()
        run_id, started_at = _insert(
            worker=worker,
            message_id=message_id,
            tick=tick,
            trigger=trigger,
            epoch=epoch,
            cursor=cursor,
            counts=counts or {},
        )
        skew = ClockSkew.between(before, started_at, SYSTEM_CLOCK.now())
        history = [PastRun(outcome, counts) for outcome, *_, counts in last]
        return Attempt(run_id, started_at, cursor, epoch, history, skew, rejected)


def _alone_with(message_id: str) -> None:
    """Wait until no other delivery of the message begins: one that sleeps in there would begin what is done by then."""
    database.execute_sql("SELECT pg_advisory_xact_lock(hashtextextended(%s, 0))", (f"housekeeping run {message_id}",))


def completed(message_id: str) -> bool:
    """Whether a run of the message has ended well, so that no other is to begin."""
    return bool(Run.select(Run.id).where((Run.message_id == message_id) & _ended_well()).exists())


def has_worked(worker: str) -> bool:
    """Whether a run of the worker has ended well, or was confirmed, as far back as the ledger reaches."""
    confirmed = Run.counts.contains({"confirmed": True})
    return bool(Run.select(Run.id).where((Run.worker == worker) & (_ended_well() | confirmed)).exists())


def _ended_well() -> Expression:
    done: Expression = (Run.outcome == "done") | ((Run.outcome == "partial") & (Run.reason != "shutdown"))
    return done


def _last_runs(worker: str, subject: str) -> tuple[list[tuple[Outcome, str | None, Cursor | None, Counts]], bool]:
    """Return the worker's last runs, newest first, and whether records of the subject stand rejected since one."""
    standing = Rejection.select(Rejection.cause).where((Rejection.worker == worker) & (Rejection.subject == subject))
    told = Run.reason.is_null() | Run.reason.not_in(REFUSED) | (Run.outcome != "failed")
    rows: Any = (
        Run.select(Run.outcome, Run.reason, Run.cursor, Run.counts, fn.EXISTS(standing))
        .where((Run.worker == worker) & ~(Run.outcome.in_(("skipped", "missed"))) & told)
        .order_by(Run.id.desc())
        .limit(HISTORY)
        .tuples()
    )
    found = list(rows)
    return [row[:-1] for row in found], bool(found and found[0][-1])


def _stopped_at(last: tuple[Outcome, str | None, Cursor | None, Counts], resume: Resume) -> Cursor | None:
    outcome, reason, cursor, _ = last
    if resume == "never":
        return None
    interrupted = outcome in ("lost", "lost_lease", "failed") or (outcome == "partial" and reason in _GO_ON)
    cut_short = resume == "cut_short" and outcome == "partial"
    return cursor if interrupted or cut_short else None


def advance(run_id: int, counts: Counts, cursor: Cursor | None, lease: tuple[str, int] | None) -> Override | None:
    """Write what the run has done so far; to be called inside the batch's own transaction.

    Returns what operators say of the worker now; None: nothing.

    Raises:
      RunTakenOver: When another run took this one for dead; the caller's transaction must roll back.
      LeaseLost: When another holder has begun since the lease was taken; likewise.
    """
    return _write(run_id, lease, counts=counts, cursor=cursor, heartbeat_at=NOW)


def beat(run_id: int) -> Override | None:
    """Say that the run lives, between batches that take long; to be called inside a transaction.

    Returns what operators say of the worker now, as `advance`.

    Raises:
      RunTakenOver: When another run took this one for dead.
    """
    return _write(run_id, None, heartbeat_at=NOW)


def check(run_id: int) -> None:
    """Ask whether the run still counts; one round trip.

    Raises:
      RunTakenOver: When another run took this one for dead.
    """
    still_open = _writes.get(Run._meta.schema, "open", lambda: Run.select(Run.id).where(_open(Parameter(0))))
    if not still_open.rows(run_id):
        raise _taken_over(run_id)


def finish(
    run_id: int,
    outcome: Outcome,
    reason: str | None,
    *,
    counts: Counts,
    cursor: Cursor | None,
    lease: tuple[str, int] | None = None,
) -> None:
    """Close the run's row; inside the last batch's transaction, so that work and completion are one.

    Raises:
      RunTakenOver, LeaseLost: As `advance`.
    """
    _write(
        run_id,
        lease,
        counts=counts,
        cursor=cursor,
        heartbeat_at=NOW,
        outcome=outcome,
        reason=reason,
        finished_at=NOW,
    )


#: How rows of runs are written, by the columns, and looked at: put together once for each schema.
_writes: Final = QueryCache()


def _write(run_id: int, lease: tuple[str, int] | None, **columns: Any) -> Override | None:
    given = {name: value for name, value in columns.items() if value is not NOW}
    form = (tuple(columns), tuple(given), lease is None)
    statement = _writes.get(Run._meta.schema, form, lambda: _writing(columns, given, lease))
    values = [Run._meta.fields[name].db_value(value) for name, value in given.items()]
    for worker, said in statement.rows(run_id, *(lease or (None, None)), *values):
        return None if said is None else _as_switch(worker, *said)
    if lease is not None and Run.select(Run.id).where(_open(run_id)).exists():
        raise LeaseLost(f"lease {lease[0]!r} has been taken by another holder since epoch {lease[1]}")
    raise _taken_over(run_id)


def _taken_over(run_id: int) -> RunTakenOver:
    return RunTakenOver(f"run {run_id} was taken for dead and has been taken over")


def _open(run_id: Any) -> Any:
    return (Run.id == run_id) & Run.outcome.is_null()


def _writing(columns: dict[str, Any], given: dict[str, Any], lease: tuple[str, int] | None) -> Query:
    """Write these columns of an open run; the places are its id, key and epoch of its lease, and those given."""
    run_id, key, epoch = Parameter(0), Parameter(1), Parameter(2)
    ours = _open(run_id)
    if lease is not None:
        # FOR SHARE: a new holder's epoch waits for this batch to end, so that none commits behind its back.
        held = Lease.select(Lease.key).where((Lease.key == key) & (Lease.epoch == epoch)).for_update("FOR SHARE")  # type: ignore[arg-type]
        ours &= fn.EXISTS(held)
    places = {name: Parameter(number) for number, name in enumerate(given, start=3)}
    query: Query = Run.update(**{**columns, **places}).where(ours).returning(Run.worker, _SAID).tuples()
    return query


def _as_switch(worker: str, state: Any, batch_size: int | None, max_runtime_s: float | None) -> Override:
    longest = None if max_runtime_s is None else timedelta(seconds=max_runtime_s)
    return Override(worker, state, batch_size=batch_size, max_runtime=longest)


def fail(run_id: int, outcome: Outcome, reason: str, error: str | None, extra: Counts) -> Closed:
    """Close the row of a run that broke off; its counts stay what the last committed batch wrote.

    Returns how the row stands now: a COMMIT whose answer was lost may have counted more than the run knows
    of, or may have closed it. A row that was already closed stays as it is.
    """
    with database.atomic():
        Run.update(
            outcome=outcome,
            reason=reason,
            error=error,
            finished_at=NOW,
            heartbeat_at=NOW,
            counts=Run.counts.concat(extra),
        ).where(_open(run_id)).execute()
        row: Any = Run.select(Run.outcome, Run.reason, Run.counts).where(Run.id == run_id).tuples().get()
    return Closed(*row)


def record(
    worker: str,
    outcome: Outcome,
    reason: str,
    *,
    message_id: str | None,
    tick: datetime | None,
    trigger: Trigger,
    counts: Counts | None = None,
) -> tuple[int, datetime]:
    """Write a row for a run that never began (skipped, missed); returns its id and time."""
    with database.atomic():
        return _insert(
            worker=worker,
            message_id=message_id,
            tick=tick,
            trigger=trigger,
            finished_at=NOW,
            outcome=outcome,
            reason=reason,
            counts=counts or {},
        )


def _insert(**columns: Any) -> tuple[int, datetime]:
    """Write a row that begins now; its id and time."""
    row = Run.insert(started_at=NOW, heartbeat_at=NOW, **columns).returning(Run.id, Run.started_at)
    run_id, started_at = next(iter(row.tuples().execute()))
    return run_id, started_at


def holder_is_gone(worker: str, key: str, token: str) -> bool:
    """Whether the run that took the lease with this token has ended, or given no sign of life for `SILENCE`.

    No for a token that is no run's of this worker: application code may hold the same key.
    """
    lease = Lease.select(Lease.epoch).where((Lease.key == key) & (Lease.holder == token)).tuples().first()
    if lease is None:
        return False
    alive = Run.outcome.is_null() & (Run.heartbeat_at >= NOW - SILENCE)
    return not Run.select(Run.id).where((Run.worker == worker) & (Run.epoch == lease[0]) & alive).exists()


def at_work(worker: str) -> frozenset[int]:
    """The worker's runs whose rows are open: `begin` has closed those that were dead then."""
    found: Any = Run.select(Run.id).where((Run.worker == worker) & Run.outcome.is_null()).tuples()
    return frozenset(run_id for (run_id,) in found)


def is_unfinished(message_id: str) -> bool:
    """Whether an attempt at this message is still open: at work, or dead."""
    return bool(Run.select(Run.id).where((Run.message_id == message_id) & Run.outcome.is_null()).exists())
