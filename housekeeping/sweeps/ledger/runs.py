"""Runs in the ledger: one row per attempt, written in the transaction of the work that it counts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final, Literal

from peewee import CTE, SQL, Case, Expression, Query, Select, fn

from housekeeping.core.clock import SYSTEM_CLOCK
from housekeeping.core.errors import LeaseLost, RunTakenOver
from housekeeping.database.clock_skew import ClockSkew
from housekeeping.database.compiled_query import CompiledQuery, Parameter, QueryCache
from housekeeping.database.connection import database
from housekeeping.leases.fencing import next_epoch
from housekeeping.sweeps.ledger.models import NOW, Lease, Rejection, Run, Switch
from housekeeping.sweeps.ledger.overrides import Override

Trigger = Literal["schedule", "enqueue", "cli", "parent"]
Outcome = Literal["done", "partial", "skipped", "failed", "lost_lease", "lost", "missed"]
#: Which runs a new one resumes: none, an interrupted one, or also one that reached its limits.
Resume = Literal["never", "interrupted", "cut_short"]
Counts = dict[str, Any]
#: Stage of a run and position in it: ``{"pass": ..., "after": [...]}``.
Cursor = dict[str, Any]

#: Maximum interval between heartbeats; each batch is one.
HEARTBEAT: Final = timedelta(seconds=20)
#: Three missed heartbeats: the run is then considered dead. A single late one may be a slow statement or network.
SILENCE: Final = 3 * HEARTBEAT
#: Key in a run's counts of the fingerprint of its predicate. It is not a count, and not shown.
PREDICATE: Final = "predicate"
#: Number of past runs that make up a worker's history.
HISTORY: Final = 50
#: Reasons of runs that were stopped before their first change.
REFUSED: Final = ("breaker", "clock")
#: Reasons of runs that ended early for a cause other than their position. The next run resumes there.
STOPPED: Final = ("shutdown", "paused", "gate")
#: Reasons after which the next run resumes. A run that its breaker limited has done its work, but the next one must not
#: begin with the same rows if they stay stale.
_RESUMED: Final = (*STOPPED, "breaker")

#: The operators' override, read by the statement that writes the run's row, without a round trip.
_OVERRIDE: Final = Switch.select(fn.JSONB_BUILD_ARRAY(Switch.state, Switch.batch_size, Switch.max_runtime_s)).where(
    (Switch.worker == Run.worker) & (Switch.until.is_null() | (Switch.until > NOW))
)


@dataclass(frozen=True, slots=True)
class PastRun:
    """Outcome and counts of an earlier run."""

    outcome: Outcome
    counts: Counts


@dataclass(frozen=True, slots=True)
class Attempt:
    """A run that has begun.

    Attributes:
      run_id: Its row.
      started_at: By the database's clock.
      cursor: Where the run resumes; None: at the front.
      epoch: Fencing token of its lease; None: it has no lease.
      history: The worker's last runs, newest first, without those that were stopped before their first change.
      clock_skew: How far this machine's clock is from the database's.
      rejected: Whether an earlier run of the worker with the same argument has left rejected rows.
      heartbeat_at: The row's first heartbeat, as PostgreSQL writes it.
    """

    run_id: int
    started_at: datetime
    cursor: Cursor | None
    epoch: int | None
    history: Sequence[PastRun]
    clock_skew: ClockSkew
    rejected: bool = False
    heartbeat_at: str | None = None


@dataclass(frozen=True, slots=True)
class Closed:
    """End of a run, as its closed row has it."""

    outcome: Outcome
    reason: str | None
    counts: Counts


@dataclass(frozen=True, slots=True)
class Resynchronized:
    """State of the ledger row after a batch whose answer was lost."""

    is_closed: bool
    counts: Counts
    cursor: Cursor | None


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
    """Begin a run, and close the rows of dead runs; None if this message was already completed. One transaction.

    A run whose heartbeat is older than `SILENCE`, and any earlier run of this message, is considered dead. Its outcome
    becomes ``lost``, so that it cannot commit anything even if it was only asleep.

    Parameters:
      lease: Key and token of the run's lease, which gets an epoch.
      resume: Which earlier runs the new one resumes.
      subject: The run's argument as text.
      counts: Initial counts.
    """
    with database.atomic() as transaction:
        if message_id is not None:
            _lock_message(message_id)
        silent = Run.heartbeat_at < NOW - SILENCE
        dead = silent if message_id is None else silent | (Run.message_id == message_id)
        Run.update(outcome="lost", reason="taken_over", finished_at=NOW).where(
            (Run.worker == worker) & Run.outcome.is_null() & dead
        ).execute()
        # Only now: the update has waited for an earlier attempt that was committing its last batch.
        if message_id is not None and completed(message_id):
            transaction.rollback()
            return None
        # In the row's transaction, so that every holder in the ledger has a run there. Before the history is read: this
        # waits for a holder that is committing its last batch and may end as done.
        epoch = None if lease is None else next_epoch(*lease)
        last, rejected = _last_runs(worker, subject)
        cursor = _stopped_at(last[0], resume) if last else None
        before = SYSTEM_CLOCK.now()
        run_id, started_at, heartbeat_at = _insert(
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
        return Attempt(run_id, started_at, cursor, epoch, history, skew, rejected, heartbeat_at)


def _lock_message(message_id: str) -> None:
    """Lock the message id, so that two deliveries cannot both begin."""
    database.execute_sql("SELECT pg_advisory_xact_lock(hashtextextended(%s, 0))", (f"housekeeping run {message_id}",))


def completed(message_id: str) -> bool:
    """Return whether a run of the message has completed."""
    return bool(Run.select(Run.id).where((Run.message_id == message_id) & _ended_well()).exists())


def has_worked(worker: str) -> bool:
    """Return whether the ledger has a run of the worker that completed or was confirmed."""
    confirmed = Run.counts.contains({"confirmed": True})
    return bool(Run.select(Run.id).where((Run.worker == worker) & (_ended_well() | confirmed)).exists())


def last_predicate(worker: str) -> tuple[str, bool] | None:
    """Return the fingerprint of the worker's last completed run that has one, and whether it is of the last day."""
    found = fn.JSONB_EXTRACT_PATH_TEXT(Run.counts, PREDICATE)
    rows: Any = Run.select(found, Run.started_at > NOW - timedelta(days=1)).where(
        (Run.worker == worker) & found.is_null(False)
    )
    for text, is_fresh in rows.order_by(Run.id.desc()).limit(1).tuples():
        return text, is_fresh
    return None


def remember_predicate(run_id: int, fingerprint: str) -> None:
    """Write the fingerprint of a completed run's predicate into its row."""
    Run.update(counts=Run.counts.concat({PREDICATE: fingerprint})).where(Run.id == run_id).execute()


def any_by_a_worker_process() -> bool:
    """Return whether the ledger has a run that a worker process carried out, not the command ``run``."""
    return bool(Run.select(Run.id).where(Run.trigger != "cli").exists())


def _ended_well() -> Expression:
    done: Expression = (Run.outcome == "done") | ((Run.outcome == "partial") & (Run.reason != "shutdown"))
    return done


def _last_runs(worker: str, subject: str) -> tuple[list[tuple[Outcome, str | None, Cursor | None, Counts]], bool]:
    """Return the worker's last runs, newest first, and whether rows of the subject are rejected."""
    rejected = Rejection.select(Rejection.cause).where((Rejection.worker == worker) & (Rejection.subject == subject))
    was_not_refused = Run.reason.is_null() | Run.reason.not_in(REFUSED) | (Run.outcome != "failed")
    rows: Any = (
        Run.select(Run.outcome, Run.reason, Run.cursor, Run.counts, fn.EXISTS(rejected))
        .where((Run.worker == worker) & ~(Run.outcome.in_(("skipped", "missed"))) & was_not_refused)
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
    interrupted = outcome in ("lost", "lost_lease", "failed") or (outcome == "partial" and reason in _RESUMED)
    cut_short = resume == "cut_short" and outcome == "partial"
    return cursor if interrupted or cut_short else None


def advance(run_id: int, counts: Counts, cursor: Cursor | None, lease: tuple[str, int] | None) -> Override | None:
    """Write counts and cursor in the batch's transaction, and return the worker's override, if any.

    Raises:
      RunTakenOver: Another run considered this one dead; the caller's transaction must roll back.
      LeaseLost: Another holder has begun since; likewise.
    """
    return _write(run_id, lease, counts=counts, cursor=cursor, heartbeat_at=NOW)


def beat(run_id: int) -> Override | None:
    """Write a heartbeat, and return the worker's override, if any. Requires a transaction.

    Raises:
      RunTakenOver: Another run considered this one dead.
    """
    return _write(run_id, None, heartbeat_at=NOW)


def check(run_id: int) -> None:
    """Raise unless the run's row is still open; one round trip.

    Raises:
      RunTakenOver: Another run considered this one dead.
    """
    still_open = _writes.get(
        Run._meta.schema, "open", lambda: CompiledQuery(Run.select(Run.id).where(_open(Parameter(0))))
    )
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
    """Close the run's row in the transaction of its last batch.

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


#: Compiled statements on runs, by their columns, for each schema.
_writes: Final = QueryCache()


def _write(run_id: int, lease: tuple[str, int] | None, **columns: Any) -> Override | None:
    given = {name: value for name, value in columns.items() if value is not NOW}
    form = (tuple(columns), tuple(given), lease is None)
    statement = _writes.get(Run._meta.schema, form, lambda: CompiledQuery(_writing(columns, given, lease)))
    values = [Run._meta.fields[name].db_value(value) for name, value in given.items()]
    for worker, override in statement.rows(run_id, *(lease or (None, None)), *values):
        return None if override is None else _override(worker, *override)
    if lease is not None and Run.select(Run.id).where(_open(run_id)).exists():
        raise LeaseLost(f"lease {lease[0]!r} has been taken by another holder since epoch {lease[1]}")
    raise _taken_over(run_id)


def _taken_over(run_id: int) -> RunTakenOver:
    return RunTakenOver(f"run {run_id} was considered dead and has been taken over")


def _open(run_id: Any) -> Any:
    return (Run.id == run_id) & Run.outcome.is_null()


def _writing(columns: dict[str, Any], given: dict[str, Any], lease: tuple[str, int] | None) -> Query:
    """Return the update of an open run. Its parameters are run id, lease key, epoch, and the given columns."""
    run_id, key, epoch = Parameter(0), Parameter(1), Parameter(2)
    condition = _open(run_id)
    if lease is not None:
        # FOR SHARE: a new holder gets its epoch only after this batch has ended.
        held = Lease.select(Lease.key).where((Lease.key == key) & (Lease.epoch == epoch)).for_update("FOR SHARE")  # type: ignore[arg-type]
        condition &= fn.EXISTS(held)
    places = {name: Parameter(number) for number, name in enumerate(given, start=3)}
    query: Query = Run.update(**{**columns, **places}).where(condition).returning(Run.worker, _OVERRIDE).tuples()
    return query


def advance_cte(
    run_id: int, lease: tuple[str, int] | None, *, counts: Any, cursor: Any, is_done: Any, heartbeat: Any
) -> tuple[CTE, CTE]:
    """Return two CTEs for the statement of a batch: the update of the run's row, and the check of run and lease.

    The second one is empty if the run was taken over or its lease has a newer holder. The statement must then fail.
    The first one returns the worker's override as JSON and the time of the heartbeat.

    Parameters:
      counts, cursor: SQL for the new values.
      is_done: SQL that is true if the run ends as done with this batch.
      heartbeat: SQL for the heartbeat that the row must have, or for NULL. A statement whose answer was lost, and which
        the server is still executing, can then not commit after `resynchronize`.
    """
    run = Run.update(
        counts=counts,
        cursor=cursor,
        heartbeat_at=NOW,
        outcome=Case(None, [(is_done, "done")]),
        finished_at=Case(None, [(is_done, NOW)]),
    ).where(_open(run_id) & (heartbeat.is_null() | (Run.heartbeat_at == heartbeat)))
    beat = Run.heartbeat_at.cast("text").alias("heartbeat_at")
    advanced = run.returning(_OVERRIDE.alias("override"), beat).cte("advanced")
    if lease is None:
        return advanced, Select((advanced,), [SQL("1")]).cte("accepted")
    key, epoch = lease
    # FOR SHARE: a new holder gets its epoch only after this batch has ended. The run's row is locked first, as `begin`
    # does, so that the two cannot wait for each other.
    held = (Lease.key == key) & (Lease.epoch == epoch) & fn.EXISTS(Select((advanced,), [SQL("1")]))
    return advanced, Lease.select(Lease.key).where(held).for_update("FOR SHARE").cte("accepted")  # type: ignore[arg-type]


def resynchronize(run_id: int, heartbeat: str) -> Resynchronized | None:
    """Return what the row holds after an answer was lost; None if nothing was committed.

    Writes a heartbeat, so that a statement which the server is still executing cannot commit any more. Waits for it if
    it has reached the run's row.

    Parameters:
      heartbeat: The row's heartbeat before the statement.

    Raises:
      RunTakenOver: Another run considered this one dead.
      peewee.PeeweeException: The database cannot be reached.
    """
    with database.atomic():
        columns = (Run.outcome, Run.counts, Run.cursor, Run.heartbeat_at.cast("text"))
        row: Any = Run.select(*columns).where(Run.id == run_id).for_update().tuples().first()
        if row is None or row[0] not in (None, "done"):
            raise _taken_over(run_id)
        if row[0] is None:
            Run.update(heartbeat_at=NOW).where(Run.id == run_id).execute()
        return None if row[3] == heartbeat else Resynchronized(row[0] == "done", row[1], row[2])


def override_from_json(worker: str, values: Sequence[Any] | None) -> Override | None:
    """Return the override that `advance_cte` has returned as JSON."""
    return None if values is None else _override(worker, *values)


def _override(worker: str, state: Any, batch_size: int | None, max_runtime_s: float | None) -> Override:
    max_runtime = None if max_runtime_s is None else timedelta(seconds=max_runtime_s)
    return Override(worker, state, batch_size=batch_size, max_runtime=max_runtime)


def fail(run_id: int, outcome: Outcome, reason: str, error: str | None, extra: Counts) -> Closed:
    """Close the row of a run that an error ended, keep the counts of its last committed batch, and return the row.

    A row that was already closed stays unchanged. A COMMIT whose answer was lost may have closed it, or have counted
    more than the run knows.
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
    """Write the row of a run that never began (skipped, missed), and return its id and time."""
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
        )
    return run_id, at


def _insert(**columns: Any) -> tuple[int, datetime, str]:
    """Insert a row that begins now, and return its id, time and heartbeat."""
    row = Run.insert(started_at=NOW, heartbeat_at=NOW, **columns).returning(
        Run.id, Run.started_at, Run.heartbeat_at.cast("text")
    )
    run_id, started_at, heartbeat_at = next(iter(row.tuples().execute()))
    return run_id, started_at, heartbeat_at


def holder_is_gone(worker: str, key: str, token: str) -> bool:
    """Return whether the run that holds the lease with this token has ended, or missed its heartbeats for `SILENCE`.

    False for a token that belongs to no run of this worker: application code may hold the same key.
    """
    lease = Lease.select(Lease.epoch).where((Lease.key == key) & (Lease.holder == token)).tuples().first()
    if lease is None:
        return False
    alive = Run.outcome.is_null() & (Run.heartbeat_at >= NOW - SILENCE)
    return not Run.select(Run.id).where((Run.worker == worker) & (Run.epoch == lease[0]) & alive).exists()


def at_work(worker: str) -> frozenset[int]:
    """Return the ids of the worker's open runs; `begin` has closed those that were dead."""
    found: Any = Run.select(Run.id).where((Run.worker == worker) & Run.outcome.is_null()).tuples()
    return frozenset(run_id for (run_id,) in found)


def is_unfinished(message_id: str) -> bool:
    """Return whether an attempt at this message is open: running, or dead."""
    return bool(Run.select(Run.id).where((Run.message_id == message_id) & Run.outcome.is_null()).exists())
