"""A run's row in the ledger, from its begin to its end.

The row is written in the transaction of the work that it counts. A batch that is one statement has the row's update in
it; if its answer is lost, the row shows whether it was committed.

Ticks that start no run have rows as well. Each change of them is one transaction, which locks the ticks of its worker.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Final, Literal

from peewee import CTE, SQL, Case, DataError, Expression, Query, Select, Value, fn

from housekeeping.core.clock import SYSTEM_CLOCK, ClockSkew
from housekeeping.core.cron import Cron
from housekeeping.core.errors import LeaseLost, RunTakenOver
from housekeeping.core.logs import in_one_line
from housekeeping.database.connection import database
from housekeeping.database.queries import CompiledQuery, Parameter, PreparedQuery, QueryCache
from housekeeping.ledger.leases import Fence, epoch_query, is_of
from housekeeping.ledger.operators import OVERRIDE, Override, override_from
from housekeeping.ledger.schema import NEWEST_FIRST, NOW, LeaseRow, Rejection, Run

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
#: Beginning of the reason of a run that failed because the disk of its database was full.
DISK_FULL: Final = "disk full: "
#: Key in a run's counts of the fingerprint of its predicate. It is not a count, and not shown.
PREDICATE: Final = "predicate"
#: Key in a run's counts of what a purge was asked to do. It is not a count either.
PURGE: Final = "purge"
#: Key in a run's counts of the run whose rows it restores, and of the condition on them. No count either.
RESTORE: Final = "restore"
#: Reasons of runs that something outside of them ended early. The next run resumes where they stopped.
STOPPED: Final = ("shutdown", "paused", "stopped", "gate")


@dataclass(frozen=True, slots=True)
class RunRow:
    """What the row of a run says about its work.

    Attributes:
      outcome: None while the run is open.
      cursor: Where it stopped; None at the front.
    """

    outcome: Outcome | None
    reason: str | None
    cursor: Cursor | None
    counts: Counts


def advance(run_id: int, counts: Counts, cursor: Cursor | None, fence: Fence | None) -> Override | None:
    """Write counts and cursor in the batch's transaction, and return the worker's override, if any.

    Raises:
      RunTakenOver: Another run considered this one dead; the caller's transaction must roll back.
      LeaseLost: Another holder has begun since; likewise.
    """
    return _write(run_id, fence, counts=counts, cursor=cursor, heartbeat_at=NOW)


def beat(run_id: int) -> Override | None:
    """Write a heartbeat, and return the worker's override, if any. Requires a transaction.

    Raises:
      RunTakenOver: Another run considered this one dead.
    """
    return _write(run_id, None, heartbeat_at=NOW)


def check(run_id: int) -> Override | None:
    """Return the run's override, if any, provided that its row is still open; one round trip.

    Raises:
      RunTakenOver: Another run considered this one dead.
    """
    statement = _writes.get(
        Run._meta.schema, "open", lambda: CompiledQuery(Run.select(*_ORDERS).where(is_open(Parameter(0))).tuples())
    )
    for orders in statement.rows(run_id):
        return override_from(*orders)
    raise taken_over(run_id)


def request_stop(run_id: int, user: str) -> tuple[bool, str | None]:
    """Ask a run to stop after its batch. Return whether this call was the first, and the operator of the first call.

    An ended run is not stopped; its operator is None unless it was stopped while it was open. The message of a stopped
    run counts as completed, however the run ends.
    """
    with database.atomic():
        # Waits for the statement of a batch, which may close the row.
        asked = Run.update(stopped_by=in_one_line(user, _LONGEST_USER)).where(
            is_open(run_id) & Run.stopped_by.is_null()
        )
        is_new = bool(asked.execute())
        return is_new, Run.select(Run.stopped_by).where(Run.id == run_id).scalar()


def finish(
    run_id: int,
    outcome: Outcome,
    reason: str | None,
    *,
    counts: Counts,
    cursor: Cursor | None,
    fence: Fence | None = None,
) -> None:
    """Close the run's row in the transaction of its last batch.

    Raises:
      RunTakenOver, LeaseLost: As `advance`.
    """
    _write(
        run_id,
        fence,
        counts=counts,
        cursor=cursor,
        heartbeat_at=NOW,
        outcome=outcome,
        reason=reason,
        finished_at=NOW,
    )


#: What the operators want of a run, for the statement that reads or writes its row: it costs no round trip.
_ORDERS: Final = (Run.worker, OVERRIDE.alias("override"), Run.stopped_by)
_LONGEST_USER: Final = 200  # characters
#: Compiled statements on runs, by their columns, for each schema.
_writes: Final = QueryCache()


def _write(run_id: int, fence: Fence | None, **columns: Any) -> Override | None:
    given = {name: value for name, value in columns.items() if value is not NOW}
    form = (tuple(columns), tuple(given), fence is None)
    statement = _writes.get(Run._meta.schema, form, lambda: CompiledQuery(_writing(columns, given, fence)))
    values = [Run._meta.fields[name].db_value(value) for name, value in given.items()]
    for orders in statement.rows(run_id, *(fence or (None, None, None)), *values):
        return override_from(*orders)
    if fence is not None and Run.select(Run.id).where(is_open(run_id)).exists():
        raise LeaseLost(f"lease {fence.key!r} has been taken by another holder since epoch {fence.epoch}")
    raise taken_over(run_id)


def taken_over(run_id: int) -> RunTakenOver:
    return RunTakenOver(f"run {run_id} was considered dead and has been taken over")


def is_open(run_id: Any) -> Any:
    return (Run.id == run_id) & Run.outcome.is_null()


def _writing(columns: dict[str, Any], given: dict[str, Any], fence: Fence | None) -> Query:
    """Return the update of an open run. Its parameters are run id, fence, and the given columns."""
    run_id, key, epoch, holder = (Parameter(number) for number in range(4))
    condition = is_open(run_id)
    if fence is not None:
        # FOR SHARE: a new holder gets its epoch only after this batch has ended.
        held = LeaseRow.select(LeaseRow.key).where(is_of(key, epoch, holder)).for_update("FOR SHARE")  # type: ignore[arg-type]
        condition &= fn.EXISTS(held)
    places = {name: Parameter(number) for number, name in enumerate(given, start=4)}
    query: Query = Run.update(**{**columns, **places}).where(condition).returning(*_ORDERS).tuples()
    return query


def fail(
    run_id: int, outcome: Outcome, reason: str, error: str | None, extra: Counts, traceback: str | None = None
) -> RunRow:
    """Close the row of a run that an error ended, keep the counts of its last committed batch, and return the row.

    A row that was already closed stays unchanged. A COMMIT whose answer was lost may have closed it, or have counted
    more than the run knows.
    """
    with database.atomic():
        Run.update(
            outcome=outcome,
            reason=reason,
            error=error,
            traceback=traceback,
            finished_at=NOW,
            heartbeat_at=NOW,
            # What a COMMIT without an answer has counted stays.
            counts=Value(json.dumps(extra)).cast("jsonb").concat(Run.counts),
        ).where(is_open(run_id)).execute()
        columns = (Run.outcome, Run.reason, Run.cursor, Run.counts)
        row: Any = Run.select(*columns).where(Run.id == run_id).tuples().get()
    return RunRow(*row)


def advance_cte(
    run_id: Any,
    fence: Sequence[Any] | None,
    numbers: CTE,
    *,
    counts: Any,
    cursor: Any,
    is_done: Any,
    heartbeat: Any,
    backlog: Any = None,
) -> tuple[CTE, CTE]:
    """Return two CTEs for the statement of a batch: the update of the run's row, and the check of run and lease.

    The second one is empty if the run was taken over or its lease has a newer holder. The statement must then fail.
    The first one returns the worker's override as JSON, who stops the run, the time of the heartbeat, and the backlog.

    Parameters:
      run_id, fence: Values, or SQL for them.
      numbers: What the batch has done, as one row. The other parameters may use its columns.
      counts, cursor: SQL for the new values.
      is_done: SQL that is true if the run ends as done with this batch.
      heartbeat: SQL for the heartbeat that the row must have; NULL: any. If the statement's answer is lost while the
        server is still executing it, it can then not commit after `resynchronize`.
      backlog: SQL for the number of stale rows that are left; NULL or None: it is not known yet.
    """
    left = {}
    if backlog is not None:
        left = {"backlog": backlog, "backlog_exact": Case(None, [(backlog.is_null(False), True)])}
    run = (
        Run.update(
            counts=counts,
            cursor=cursor,
            heartbeat_at=NOW,
            outcome=Case(None, [(is_done, "done")]),
            finished_at=Case(None, [(is_done, NOW)]),
            **left,
        )
        .from_(numbers)
        .where(is_open(run_id) & (heartbeat.is_null() | (Run.heartbeat_at == heartbeat)))
    )
    beat = Run.heartbeat_at.cast("text").alias("heartbeat_at")
    advanced = run.returning(*_ORDERS, beat, Run.backlog).cte("advanced")
    if fence is None:
        return advanced, Select((advanced,), [SQL("1")]).cte("accepted")
    # FOR SHARE: a new holder gets its epoch only after this batch has ended. The run's row is locked first, as `begin`
    # does, so that the two cannot wait for each other.
    held = is_of(*fence) & fn.EXISTS(Select((advanced,), [SQL("1")]))
    return advanced, LeaseRow.select(LeaseRow.key).where(held).for_update("FOR SHARE").cte("accepted")  # type: ignore[arg-type]


def resynchronize(run_id: int, heartbeat: str) -> RunRow | None:
    """Return what the row holds after an answer was lost; None if nothing was committed.

    Writes a new heartbeat, so that a statement that the server is still executing can no longer commit. If that
    statement has locked the run's row already, waits for it.

    Parameters:
      heartbeat: The row's heartbeat before the statement.

    Raises:
      RunTakenOver: Another run considered this one dead.
      peewee.PeeweeException: The database cannot be reached.
    """
    with database.atomic():
        columns = (Run.heartbeat_at.cast("text"), Run.outcome, Run.reason, Run.cursor, Run.counts)
        rows: Any = Run.select(*columns).where(Run.id == run_id).for_update().tuples()
        for heartbeat_now, *row in rows:
            found = RunRow(*row)
            if found.outcome not in (None, "done"):
                break
            if found.outcome is None:
                Run.update(heartbeat_at=NOW).where(Run.id == run_id).execute()
            return None if heartbeat_now == heartbeat else found
        raise taken_over(run_id)


#: Not `clock_timestamp()`, which changes within a statement, so that no index could be used for it.
_NOW: Final = SQL("now()")


def completed(message_id: str) -> bool:
    """Return whether a run of the message has completed, or an operator has stopped it."""
    return bool(_completed(message_id).exists())


def _completed(message_id: Any) -> Any:
    completed = _ended_well() | Run.stopped_by.is_null(False)
    return Run.select(Run.id).where((Run.message_id == message_id) & completed)


def has_worked(worker: str) -> bool:
    """Return whether the ledger has a run of the worker that completed or was confirmed."""
    confirmed = Run.counts.contains({"confirmed": True})
    return bool(Run.select(Run.id).where((Run.worker == worker) & (_ended_well() | confirmed)).exists())


def last_predicate(worker: str) -> tuple[str, bool] | None:
    """Return the fingerprint of the worker's last run that has one, and whether that run began in the last day."""
    for text, is_fresh in _predicates(worker).tuples():
        return text, is_fresh
    return None


def _predicates(worker: Any, put: Callable[..., Any] | None = None) -> Any:
    """Return the query of `last_predicate`; `put` combines both values into one column."""
    found = fn.JSONB_EXTRACT_PATH_TEXT(Run.counts, PREDICATE)
    columns = (found, Run.started_at > NOW - timedelta(days=1))
    rows = Run.select(*columns if put is None else [put(*columns)])
    return rows.where((Run.worker == worker) & found.is_null(False)).order_by(Run.id.desc()).limit(1)


def remember_predicate(run_id: int, fingerprint: str) -> None:
    """Write the fingerprint of a completed run's predicate into its row."""
    Run.update(counts=Run.counts.concat({PREDICATE: fingerprint})).where(Run.id == run_id).execute()


def resumed_by(run_id: int) -> int | None:
    """Return the run that has resumed this purge; None if there is none. Skipped runs have changed nothing."""
    found: int | None = _resuming(run_id).order_by(Run.id).limit(1).scalar()
    return found


def _resuming(run_id: int) -> Any:
    resumed = Run.counts.contains({PURGE: {"resumes": run_id}})
    began = Run.outcome.is_null() | (Run.outcome != "skipped")
    return Run.select(Run.id).where((Run.id > run_id) & resumed & began)


def _ended_well() -> Expression:
    done: Expression = (Run.outcome == "done") | ((Run.outcome == "partial") & (Run.reason != "shutdown"))
    return done


def holder_is_gone(worker: str, key: str, token: str) -> bool:
    """Return whether the run that holds the lease with this token has ended, or missed its heartbeats for `SILENCE`.

    False for a token that belongs to no run of this worker: application code may hold the same key.
    """
    lease = LeaseRow.select(LeaseRow.epoch).where((LeaseRow.key == key) & (LeaseRow.holder == token)).tuples().first()
    if lease is None:
        return False
    alive = Run.outcome.is_null() & (Run.heartbeat_at >= NOW - SILENCE)
    return not Run.select(Run.id).where((Run.worker == worker) & (Run.epoch == lease[0]) & alive).exists()


def at_work(worker: str) -> frozenset[int]:
    """Return the ids of the worker's open runs; `begin` has closed those that were dead."""
    found: Any = Run.select(Run.id).where((Run.worker == worker) & Run.outcome.is_null()).tuples()
    return frozenset(run_id for (run_id,) in found)


def is_at_work(worker: str) -> bool:
    """Return whether a run of the worker is open and has sent a heartbeat within `SILENCE`."""
    alive = Run.outcome.is_null() & (Run.heartbeat_at >= NOW - SILENCE)
    return bool(Run.select(Run.id).where((Run.worker == worker) & alive).exists())


def is_unfinished(message_id: str) -> bool:
    """Return whether an attempt at this message is open: running, or dead."""
    return bool(Run.select(Run.id).where((Run.message_id == message_id) & Run.outcome.is_null()).exists())


def deferred(worker: str, arguments: Iterable[Any] | None = None) -> Any:
    """Return a query of the worker's arguments whose delay has not passed, for the sweep that enqueues its runs.

    Its columns are `subject`, the argument as text, and `position`, where the last run ended; NULL if it failed. An
    argument may come several times, once for each cause.

    Parameters:
      arguments: Only these; None for all.
    """
    waiting = (Rejection.worker == worker) & (Rejection.not_before > _NOW)
    if arguments is not None:
        # One array: a placeholder for each of a thousand arguments takes longer than the query.
        waiting &= Rejection.subject == fn.ANY(Value([str(each) for each in arguments], converter=False, unpack=False))
    return Rejection.select(Rejection.subject, Rejection.position).where(waiting)


#: Number of past runs that make up a worker's history.
HISTORY: Final = 50
#: Reasons of runs that were stopped before their first change.
_REFUSED: Final = ("breaker", "clock")
#: Reasons after which the next run resumes. A run that its breaker limited has done its work, but the next one must not
#: begin with the same rows if they stay stale.
_RESUMED: Final = (*STOPPED, "breaker")


@dataclass(frozen=True, slots=True)
class RunStart:
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
      predicate: Result of `last_predicate`; None if it was not read.
    """

    run_id: int
    started_at: datetime
    cursor: Cursor | None
    fence: Fence | None
    history: Sequence[RunRow]
    clock_skew: ClockSkew
    rejected: bool = False
    rejected_until: tuple[Any, ...] | None = None
    heartbeat_at: str | None = None
    predicate: tuple[str, bool] | None = None


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
    reads_predicate: bool = False,
) -> RunStart | None:
    """Begin a run, and close the rows of dead runs; None if its work was already done or taken over. One transaction.

    A run whose heartbeat is older than `SILENCE`, and any earlier run of this message, is considered dead. Its outcome
    becomes ``lost``, so that it cannot commit anything even if it was only suspended.

    Parameters:
      lease: Key and token of the run's lease, which gets an epoch.
      resume: Which earlier runs the new one resumes.
      resumes: The one run that the new one resumes, whatever its outcome, instead of the last one. Only one run can.
      subject: The run's argument as text.
      counts: Initial counts.
      reads_predicate: Whether to read `RunStart.predicate`.
    """
    key, token = lease or (None, None)
    of_message = (message_id, f"housekeeping run {message_id}", tick, trigger)
    values = (worker, *of_message, subject, key, token, json.dumps(counts or {}), *_process().values())
    form = (message_id is not None, lease is not None, resume, reads_predicate)
    if resumes is None:
        statement = _begins.get(Run._meta.schema, form, lambda: PreparedQuery(*_beginning(*form)))
    else:
        statement = PreparedQuery(*_beginning(*form, resumes))
    before = SYSTEM_CLOCK.now()
    try:
        rows = statement.rows_at_once(*values)
    except DataError as error:
        if _DONE not in str(error):
            raise
        return None
    ((run_id, at, heartbeat_at, epoch, cursor, history, rejected, until, predicates, _),) = rows
    started_at = at.astimezone(UTC)
    skew = ClockSkew.between(before, started_at, SYSTEM_CLOCK.now())
    fence = None if lease is None else Fence(lease[0], epoch, lease[1])
    return RunStart(
        run_id,
        started_at,
        cursor,
        fence,
        [RunRow(*row) for row in history],
        skew,
        rejected,
        None if until is None else tuple(until),
        heartbeat_at,
        next(map(tuple, predicates or ()), None),
    )


#: Invalid boolean that the last statement of `begin` casts in order to fail, so that nothing is committed.
_DONE: Final = "housekeeping: already done"
#: Compiled statements of `begin`.
_begins: Final = QueryCache()


def _beginning(
    has_message: bool, has_lease: bool, resume: Resume, reads_predicate: bool, resumes: int | None = None
) -> Iterator[Query]:
    """Yield the statements of `begin`. Their parameters are numbered as in the first line."""
    worker, message_id, locked, tick, trigger, subject, key, token, counts, host, pid = map(Parameter, range(11))
    done: Any = SQL("false")
    if has_message:
        # Locked, so that two deliveries cannot both begin.
        yield Select(columns=[_lock(locked)])
        done = fn.EXISTS(_completed(message_id))
    yield closing_dead_runs(worker, message_id if has_message else None)
    if has_lease:
        # In the row's transaction, so that every holder in the ledger has a run there. Before the history is read: this
        # waits for a holder that is committing its last batch and may end as done.
        yield epoch_query(key, token)
    if resumes is not None:
        # Locked, so that if two processes resume it at the same time, the second one sees the run of the first.
        yield Run.select(Run.id).where(Run.id == resumes).for_update()
        done = fn.EXISTS(_resuming(resumes))
        cursor: Any = Run.select(Run.cursor).where(Run.id == resumes)
    elif resume == "never":
        cursor = None
    else:
        last = _history(worker, Run.id).limit(1)
        cursor = Run.select(Run.cursor).where((Run.id == last) & _is_cut_off(resume))
    # After the first statements, which have waited for an earlier attempt that was committing its last batch.
    past = fn.JSONB_BUILD_ARRAY(Run.outcome, Run.reason, Run.cursor, Run.counts)
    yield Run.insert(
        started_at=NOW,
        heartbeat_at=NOW,
        worker=worker,
        message_id=message_id,
        tick=tick,
        trigger=trigger,
        epoch=LeaseRow.select(LeaseRow.epoch).where(LeaseRow.key == key) if has_lease else None,
        cursor=cursor,
        counts=counts.cast("jsonb"),
        host=host,
        pid=pid,
    ).returning(
        Run.id,
        Run.started_at,
        Run.heartbeat_at.cast("text"),
        Run.epoch,
        Run.cursor,
        fn.ARRAY(_history(worker, past).limit(HISTORY)),
        *_rejections(worker, subject),
        fn.ARRAY(_predicates(worker, fn.JSONB_BUILD_ARRAY)) if reads_predicate else Value(None),
        Case(None, [(done, _DONE)], "true").cast("boolean"),
    )


def past_runs(worker: str) -> list[RunRow]:
    """Return the worker's last runs, newest first, without those that were stopped before their first change."""
    columns = (Run.outcome, Run.reason, Run.cursor, Run.counts)
    return [RunRow(*row) for row in _history(worker, *columns).limit(HISTORY).tuples()]


def closing_dead_runs(worker: Any, message_id: Any = None) -> Query:
    """Return the update that closes the dead runs of a worker as ``lost``. They can no longer commit.

    Parameters:
      message_id: All earlier runs of this message are dead as well.
    """
    dead = Run.heartbeat_at < NOW - SILENCE
    if message_id is not None:
        dead |= Run.message_id == message_id
    closing: Query = Run.update(outcome="lost", reason="taken_over", finished_at=NOW).where(
        (Run.worker == worker) & Run.outcome.is_null() & dead
    )
    return closing


def _lock(text: Any) -> Any:
    """Return SQL that locks a text until the end of the transaction."""
    return fn.pg_advisory_xact_lock(fn.hashtextextended(text, 0))


def _history(worker: Any, *columns: Any) -> Any:
    """Return a query of the worker's past runs, newest first, without those stopped before their first change."""
    was_not_refused = Run.reason.is_null() | Run.reason.not_in(_REFUSED) | (Run.outcome != "failed")
    ended = (Run.worker == worker) & Run.outcome.not_in(("skipped", "missed")) & was_not_refused
    return Run.select(*columns).where(ended).order_by(NEWEST_FIRST)


def _rejections(worker: Any, subject: Any) -> tuple[Any, Any]:
    """Return SQL for whether rows of the subject are rejected, and SQL for the position of the last such run's end."""
    rejected = Rejection.select(Rejection.position).where((Rejection.worker == worker) & (Rejection.subject == subject))
    return fn.EXISTS(rejected), rejected.order_by(Rejection.last_at.desc()).limit(1)


def _is_cut_off(resume: Resume) -> Expression:
    """Return the condition of runs that the next run resumes."""
    interrupted: Expression = Run.outcome.in_(("lost", "lost_lease", "failed"))
    cut_off = Run.outcome == "partial"
    if resume != "cut_short":
        cut_off &= Run.reason.in_(_RESUMED)
    return interrupted | cut_off


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
    row = Run.insert(
        started_at=NOW,
        heartbeat_at=NOW,
        worker=worker,
        message_id=message_id,
        tick=tick,
        trigger=trigger,
        finished_at=NOW,
        outcome=outcome,
        reason=reason,
        counts=counts or {},
        traceback=traceback,
        **_process(),
    ).returning(Run.id, Run.started_at)
    with database.atomic():
        run_id, at = next(iter(row.tuples().execute()))
    return run_id, at


def _process() -> dict[str, Any]:
    return {"host": socket.gethostname(), "pid": os.getpid()}


#: Reasons of missed ticks: no scheduler ran, or one ran and could not reach a server that it needs.
NO_SCHEDULER: Final = "no_scheduler"
NOT_SENT: Final = "servers_unavailable"
_MAX_COUNTED: Final = 600_000  # missed ticks of one gap: more than a year of minutes, counted within a second
MINUTE: Final = timedelta(minutes=1)


def record_missed(worker: str, cron: Cron, after: datetime, last: datetime, reason: str) -> int:
    """Record the missed ticks of a gap, without those that another scheduler has recorded; return their number."""
    with database.atomic():
        lock_ticks(worker)
        # Ticks in the ledger are counted already, by a scheduler that died after it recorded this gap or a part of it.
        known = last_tick(worker, last + MINUTE)
        missed = cron.count(max(after, known or after), last, _MAX_COUNTED)
        if not missed:
            return 0
        record(
            worker,
            "missed",
            reason,
            message_id=None,
            tick=last,
            trigger="schedule",
            counts={"missed": missed},
        )
    return missed


def no_longer_missed(worker: str, tick: datetime) -> None:
    """Subtract a tick from the missed ticks it was counted among."""
    with database.atomic():
        lock_ticks(worker)
        gap: Any = (
            Run.select(Run.id, Run.counts)
            .where((Run.worker == worker) & (Run.outcome == "missed") & (Run.tick >= tick))
            .order_by(Run.tick)
            .limit(1)
            .tuples()
            .first()
        )
        if gap is None:
            return
        number, counts = gap
        left = counts.get("missed", 0) - 1
        if left > 0:
            Run.update(counts={**counts, "missed": left}).where(Run.id == number).execute()
        else:
            Run.delete().where(Run.id == number).execute()


def record_tick(worker: str, tick: datetime, row: dict[str, Any], *, unless_any: bool) -> None:
    """Record an outcome of a tick once. With `unless_any`, record it only if the message has no row for the tick."""
    with database.atomic():
        lock_ticks(worker)
        there = (Run.worker == worker) & (Run.tick == tick) & (Run.message_id == row["message_id"])
        if not unless_any:
            there &= Run.outcome == row["outcome"]
        if not Run.select(Run.id).where(there).exists():
            record(worker, **row, tick=tick, trigger="schedule")


def lock_ticks(worker: str) -> None:
    """Lock a worker's ticks until the end of the transaction."""
    Select(columns=[_lock(f"housekeeping ticks {worker}")]).execute(database)


def last_tick(worker: str, before: datetime) -> datetime | None:
    """Return the worker's last tick in the current ledger before a time; None without one."""
    last: datetime | None = Run.select(fn.MAX(Run.tick)).where((Run.worker == worker) & (Run.tick < before)).scalar()
    return last
