"""One run of a sweep: gates, lease, ledger row, batches, end. Read `_run` first, then the loop in `batches`."""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Final

import structlog
from dramatiq.middleware import Shutdown
from peewee import PeeweeException, ProgrammingError

from housekeeping.core import telemetry
from housekeeping.core.clock import Clock, RunBudget
from housekeeping.core.errors import (
    BreakerTripped,
    ClocksDiffer,
    DatabaseUnavailable,
    DeclarationError,
    HousekeepingError,
    LeaseLost,
    RunTakenOver,
    SchemaMissing,
    ServerUnavailable,
)
from housekeeping.core.interrupts import LostLease, run_interruptibly, run_shielded
from housekeeping.core.logs import error_line, mask_secrets, printable, shortened
from housekeeping.core.logs import logger as named_logger
from housekeeping.core.pings import pings
from housekeeping.core.settings import MAIN
from housekeeping.core.telemetry import WaitTimes, current_message, report, wait_times, withhold
from housekeeping.core.threads import free_after_fork, task_canceled
from housekeeping.database.connection import database
from housekeeping.database.errors import cause_of, is_disk_full, is_unreachable, with_way_out
from housekeeping.engine import CLOCK_SKEWS, RunRequest, RunResult, RunState, alerts, initial_counts
from housekeeping.engine.batches import Batches
from housekeeping.engine.failures import Rejections, due_for_report
from housekeeping.engine.gates import Gate, OverrideGate, before_batches
from housekeeping.engine.guard import UNCONFIRMED, RowGuard, RowLimit, is_exceeded, processed_rows
from housekeeping.leases.lease import ExclusiveLease
from housekeeping.ledger import runs, schema
from housekeeping.ledger.leases import holder_of
from housekeeping.ledger.runs import DISK_FULL, Counts
from housekeeping.middleware.consistency import data_consistency_used
from housekeeping.sweeps.actions import delete_of
from housekeeping.sweeps.declaration import Sweep
from housekeeping.sweeps.send import Send
from housekeeping.sweeps.stage import OtherClock
from housekeeping.sweeps.tree import note_branches
from housekeeping.sweeps.validate_tables import stages_of

logger = named_logger(__name__)

#: Counts that a run without a committed batch adds to its row.
_COUNTS_OF_A_BROKEN_RUN: Final = ("failed", "breaker", UNCONFIRMED, *CLOCK_SKEWS.values())
_FRAMES: Final = 30  # of a traceback, the innermost ones
_LONGEST_TRACEBACK: Final = 10_000  # characters
_MASKED: Final = 10 * _LONGEST_TRACEBACK  # characters of a huge error text that are searched for passwords
#: Start of each open run of this process, by worker and run id; in seconds since 1970.
_open_runs: Final[dict[tuple[str, int], float]] = {}
_open_runs_lock: Final = free_after_fork(threading.Lock())


def run_sweep(
    sweep: Sweep,
    argument: Any = None,
    *,
    clock: Clock | None = None,
    force: bool = False,
    confirmed: bool = False,
    max_rows: int | None = None,
    resumes: int | None = None,
    noted: Counts | None = None,
    on_batch: Callable[[Counts], None] | None = None,
    on_begin: Callable[[int], None] | None = None,
    stopping: threading.Event | None = None,
) -> RunResult:
    """Run a sweep once, record it in the ledger, and return its result. A failed run does not raise.

    Within a message the run takes the message's id, tick and trigger; otherwise its trigger is ``cli``, and a thread
    that had no connection closes its own again.

    Parameters:
      argument: The argument of the run, for a worker that takes one.
      clock: Decides what is stale, in tests. Default: the database's clock.
      force: Run even if the worker is paused or disabled, or this machine's clock is wrong.
      confirmed: An operator has confirmed that the run may process any number of rows.
      max_rows: The most rows that the run may process. A run that reaches it ends as partial, with the reason `limit`.
      resumes: The run whose cursor this one takes over, whatever its outcome.
      noted: What the run was asked to do, to be written into its counts.
      on_batch: Called with the counts after each committed batch.
      on_begin: Called with the id of the run's row once the row is written.
      stopping: Ends the run after the current batch once it is set. Default: the message's own event, or within
        `in_thread` that of a canceled task.
    """
    message = current_message.get()
    request = RunRequest(
        sweep=sweep,
        argument=argument,
        message_id=message.message_id if message else None,
        tick=message.tick if message else None,
        trigger=message.trigger if message else "cli",
        stopping=stopping or (message.stopping if message else task_canceled.get() or threading.Event()),
        force=force,
        confirmed=confirmed,
        max_rows=max_rows,
        resumes=resumes,
        noted=noted or {},
        clock=clock,
        on_batch=on_batch,
        on_begin=on_begin,
    )
    with database.using(sweep.database):
        close = message is None and database.obj is not None and database.is_closed()
        try:
            # An interrupt waits until the end of the run is recorded.
            return run_shielded(_run_and_record, request)
        finally:
            if close:
                database.close()


def _run_and_record(request: RunRequest) -> RunResult:
    """Run the sweep, then record and report its end, also after an error."""
    sweep, before = request.sweep, wait_times()
    state = RunState.of(request)
    budget = RunBudget(sweep.limits.runtime, state.clock)
    interrupt: BaseException | None = None
    with (
        database.using(sweep.database),
        structlog.contextvars.bound_contextvars(
            worker=sweep.name,
            message_id=request.message_id,
            **{} if sweep.database == MAIN else {"database": sweep.database},
        ),
    ):
        try:
            run_interruptibly(_run, request, state, budget)
        except BaseException as error:
            _end_by_error(state, error)
            if not isinstance(error, Exception | LostLease):
                interrupt = error
        _record_end(request, state)
        is_deferred = _close_rejections(request, state)
        assert state.outcome is not None
        result = RunResult(
            sweep.name,
            state.outcome,
            state.reason,
            state.run_id,
            state.started_at,
            budget.spent(),
            state.counts,
            error=state.error,
            retry_after=state.retry_after,
            is_deferred=is_deferred,
            nothing_left=state.nothing_left,
        )
        _remember_predicate(request, state)
        _report(request, state, result, wait_times().since(before), with_alerts=interrupt is None)
    if interrupt is not None:
        raise interrupt
    return result


def _run(request: RunRequest, state: RunState, budget: RunBudget) -> None:
    """Run the phases of a run in order, and set how it ends."""
    sweep = request.sweep

    # Gates: is the worker enabled, not paused, and set up?
    entry = OverrideGate(request)
    try:
        if not _passes([entry], state):
            return
    except PeeweeException:
        _send_without_database(sweep, state)
        raise

    with run_lease(request) as (lease, token):
        if lease is not None and token is None:
            _end_without_lease(request, state)
            return

        # The ledger row, with the fencing token (epoch) of the lease.
        begun = runs.begin(
            sweep.name,
            message_id=request.message_id,
            tick=request.tick,
            trigger=request.trigger,
            lease=None if lease is None or token is None else (lease.key, token),
            resume=request.resume,
            resumes=request.resumes,
            subject=request.subject,
            counts=request.noted,
            reads_predicate=sweep.guard.first_run,
        )
        if begun is None:
            state.end("skipped", "already_done", is_recorded=True)
            return
        _report_begin(request, state, begun)

        # Gates: clocks, archives, first run, breaker. They need the row: its time, and the runs before it.
        stages = stages_of(sweep)
        skews = [begun.clock_skew, *(each.clock_skew() for each in stages if isinstance(each, OtherClock))]
        telemetry.CLOCK_SKEW.set(max((skew.seconds for skew in skews), key=abs), sweep.name)
        now = request.clock.now() if request.clock else begun.started_at
        guard = RowGuard(sweep, stages, now, request.argument, confirmed=request.confirmed, begun=begun)
        state.rejections = Rejections(sweep.name, begun.run_id, request.subject)
        if not _passes(before_batches(request, stages, skews, guard, lambda: begun.history), state):
            return
        state.fingerprint = guard.fingerprint
        if any(delete_of(each) is not None for each in stages):
            state.counts |= note_branches(sweep, stages, begun.history)
        if is_exceeded(state.counts):
            telemetry.ALARM.set(1, sweep.name, "breaker")
        if request.confirmed:
            logger.info("Run is confirmed")
            state.counts["confirmed"] = True

        # The batches; the last one closes the row.
        limit = request.max_rows
        by_request = None if limit is None else RowLimit(limit, progress_counts=sweep.progress_counts, reason="limit")
        batches = Batches(
            request,
            state,
            begun,
            stages,
            now=now,
            budget=budget,
            check_lease=lease.check if lease is not None else lambda: None,
            override=entry.override,
            row_limit=by_request or guard.row_limit,
        )
        state.end(*batches.process(), is_recorded=True)


def _passes(gates: Iterable[Gate], state: RunState) -> bool:
    """Examine the gates in order, up to the first one that ends the run; set then how it ends.

    Raises:
      Exception: The error with which a gate fails the run.
    """
    for gate in gates:
        check = gate.examine()
        if check.log is not None:
            level, event, fields = check.log
            logger.log(level, event, **fields)
        state.counts |= check.counts
        if check.error is not None:
            raise check.error
        if check.effect == "skips":
            state.end("skipped", check.reason)
            return False
    return True


def _end_without_lease(request: RunRequest, state: RunState) -> None:
    if request.message_id is not None and runs.is_unfinished(request.message_id):
        # An earlier attempt at this message has the lease. It is probably dead, but its heartbeats are too recent to
        # tell. If the message ended here, its work would be lost.
        state.end("skipped", "lease_held", retry_after=runs.HEARTBEAT, is_recorded=True)
    else:
        state.end("skipped", "lease_held")


def _send_without_database(sweep: Sweep, state: RunState) -> None:
    """Send the messages of the `Send` stages before the run fails, because they need no database.

    The run's retry sends them again, so their actors should be deduplicated.
    """
    for stage in sweep.declared_stages():
        if isinstance(stage, Send):
            state.counts |= stage.send().counts


def _report_begin(request: RunRequest, state: RunState, begun: runs.RunStart) -> None:
    state.recorded(request, begun.run_id, begun.started_at)
    now = time.time()
    telemetry.LAST_ATTEMPT.set(now, request.sweep.name)
    with _open_runs_lock:
        _open_runs[request.sweep.name, begun.run_id] = now
        _set_open_run(request.sweep)
    state.rejected_before = begun.rejected
    if request.on_begin is not None:
        request.on_begin(begun.run_id)
    structlog.contextvars.bind_contextvars(run_id=begun.run_id)
    logger.info("Run started", trigger=request.trigger, tick=request.tick, resumed=begun.cursor is not None)
    if request.sweep.start_message is not None:
        logger.info(request.sweep.start_message)


@contextmanager
def run_lease(request: RunRequest) -> Iterator[tuple[ExclusiveLease | None, str | None]]:
    """Hold the sweep's lease within the block, if it is free or its holder is dead.

    Yields the lease, None for a sweep that needs none; and its token, None while another holder has it.

    Raises:
      ServerUnavailable: Nothing is held.
    """
    try:
        config = request.sweep.lease_for_run()
    except DeclarationError:  # which fails the run once it has its row
        config = None
    if config is None:
        yield None, None
        return
    # Without an epoch: the run gets one together with its row, in one transaction.
    key = config.key_for(request.argument)
    lease = ExclusiveLease(key, config.ttl, worker=request.sweep.name)
    token = lease.try_obtain() or _take_over(lease, request.sweep.name, request.message_id)
    if token is None:
        held_for = lease.held_for() or timedelta()
        logger.info("Lease is held elsewhere", lease=lease.key, held_for_s=round(held_for.total_seconds(), 1))
        yield lease, None
        return
    lease.start_renewal(interrupting=True)
    try:
        yield lease, token
    finally:
        try:
            lease.cancel()
        except ServerUnavailable as error:
            # The outcome of the run is the same; the lease expires.
            logger.warning("Lease could not be released", lease=lease.key, error=str(error))


def _take_over(lease: ExclusiveLease, worker: str, message_id: str | None) -> str | None:
    """Take the lease over from a run that ended or died without releasing it. Return None while its holder is alive."""
    owner = lease.owner()
    # Application code and plain actors may hold the same key. The ledger does not have their runs.
    if owner is None or holder_of(owner).worker != worker:
        return None
    if not (_is_of(message_id, owner) or runs.holder_is_gone(worker, lease.key, owner)):
        return None
    logger.info("Lease is taken over from a dead run", lease=lease.key)
    return lease.take_over(owner)


def _is_of(message_id: str | None, owner: str) -> bool:
    """Return whether the holder is an earlier attempt at this message that never began or has ended."""
    is_same_message = message_id is not None and holder_of(owner).message_id == message_id
    return is_same_message and not runs.is_unfinished(str(message_id))


def reason_of(error: BaseException) -> str:
    """Return the error as one line for the ledger and the logs, after ``database:`` if it comes from there."""
    if isinstance(error, ClocksDiffer):
        return "clock"
    if isinstance(error, BreakerTripped):
        return "breaker"
    if is_disk_full(error):
        return f"{DISK_FULL}{error_line(error)}"
    place = "database: " if isinstance(error, PeeweeException) else ""
    return f"{place}{error_line(error)}"


def classify_error(error: Exception) -> Exception:
    """Return the library's error for a database that is unreachable or lacks the schema, else the error itself."""
    if is_unreachable(error):
        return DatabaseUnavailable(reason_of(error))
    if isinstance(error, ProgrammingError):
        try:
            schema.require()
        except HousekeepingError as missing:
            return missing
    return error


def _end_by_error(state: RunState, error: BaseException) -> None:
    """Set the end of a run that raised this error."""
    if isinstance(error, RunTakenOver):
        state.end("lost_lease", "taken_over", error)
    elif isinstance(error, LeaseLost | LostLease):
        state.end("lost_lease", "lease_lost", error)
    elif isinstance(error, Shutdown):
        state.end("partial", "shutdown", error)
    else:
        state.end("failed", reason_of(error), error)


def _record_end(request: RunRequest, state: RunState) -> None:
    """Record the end in the ledger, and set the end that the ledger has.

    If the database cannot be reached, the row stays open and the next run closes it as ``lost``.
    """
    if state.is_recorded:
        return
    failure = state.error if state.outcome == "failed" and isinstance(state.error, Exception) else None
    if state.run_id is None:
        _record_without_row(request, state)
    else:
        _close_row(request, state, state.run_id)
    if failure is None or state.error is None:
        return
    error = classify_error(failure)
    if isinstance(error, SchemaMissing):
        state.reason = str(error)
    state.error = error
    worker, cause = request.sweep.name, cause_of(error, {})
    if due_for_report(worker, cause):
        report(error, worker=worker, run_id=state.run_id, message_id=request.message_id, cause=cause)
    else:
        withhold(error)


def _record_without_row(request: RunRequest, state: RunState) -> None:
    if state.error is not None and is_unreachable(state.error):
        return
    assert state.outcome is not None
    try:
        row = runs.record(
            request.sweep.name,
            state.outcome,
            state.reason or "",
            message_id=request.message_id,
            tick=request.tick,
            trigger=request.trigger,
            counts=request.noted,
            traceback=stored_traceback(state.error),
        )
    except PeeweeException as error:
        logger.error("Could not record the run", outcome=state.outcome, error=error_line(error))
        if state.error is None and request.tick is not None:
            _end_by_error(state, error)  # every tick has an outcome, so it is retried
    else:
        state.recorded(request, *row)


def _close_row(request: RunRequest, state: RunState, run_id: int) -> None:
    """Close the run's row and set its end, which differs if the last batch or another run has closed it."""
    error = state.error
    # A shutdown is no error.
    text = None if error is None or isinstance(error, Shutdown) else with_way_out(error)
    extra: Counts = {name: state.counts[name] for name in _COUNTS_OF_A_BROKEN_RUN if name in state.counts}
    assert state.outcome is not None
    try:
        try:
            closed = runs.fail(run_id, state.outcome, state.reason or "", text, extra, stored_traceback(error))
        except PeeweeException as again:
            if not is_disk_full(again):
                raise
            # Without the traceback, the row may fit its page.
            closed = runs.fail(run_id, state.outcome, state.reason or "", text, extra)
    except PeeweeException as again:
        logger.error("Could not close the run", outcome=state.outcome, error=error_line(again))
        return
    state.counts = {**initial_counts(request.sweep), **closed.counts}
    if closed.outcome in ("done", "partial") and closed.outcome != state.outcome:
        # The last batch was committed. Only the answer to its COMMIT was lost, or the lease after it.
        logger.warning("Run had completed before its error", error=text)
        state.end(closed.outcome, closed.reason)
    elif state.outcome == "lost_lease" and closed.outcome == "lost":
        state.end("lost_lease", "taken_over", RunTakenOver(f"run {run_id} has been taken over"))
    elif isinstance(error, LostLease):
        state.error = LeaseLost(str(error))


def stored_traceback(error: BaseException | None) -> str | None:
    """Return the traceback for the ledger, with passwords masked and the middle of a long one left out.

    None without an error, and for a shutdown.
    """
    if error is None or isinstance(error, Shutdown):
        return None
    text = "".join(traceback.format_exception(error, limit=-_FRAMES))
    # Shortened twice: the first cut may go through a password, and the second one removes what is around that cut.
    return shortened(printable(mask_secrets(shortened(text, _MASKED))), _LONGEST_TRACEBACK)


def _close_rejections(request: RunRequest, state: RunState) -> bool:
    """Log, record and report the rejected rows, however the run ended.

    A run that failed for a reason of its argument defers the argument, as one that rejected every row does. Returns
    whether that was recorded.
    """
    if state.rejections is None:
        return False
    complete = state.saw_everything and state.outcome == "done"
    at_limit = (state.outcome, state.reason) == ("partial", "limit")
    processed = bool(processed_rows(state.counts, request.sweep.progress_counts))
    has_failed = state.outcome == "failed" and request.sweep.argument is not None and _concerns_argument(state)
    return state.rejections.close(
        complete=complete,
        delayed=has_failed or ((complete or at_limit) and not processed),
        rejected_before=state.rejected_before,
        position=state.position,
        worked=processed and state.outcome in ("done", "partial"),
        failure=state.error if has_failed else None,
    )


def _concerns_argument(state: RunState) -> bool:
    """Return whether the error that ended a run concerns its argument, and not every run of the worker."""
    if isinstance(state.error, HousekeepingError):
        return not state.error.concerns_all
    return isinstance(state.error, Exception) and not isinstance(state.error, PeeweeException)


def _remember_predicate(request: RunRequest, state: RunState) -> None:
    """Write the predicate's fingerprint, so that the next run notices a changed predicate; never raises."""
    completed = state.outcome == "done" or (state.outcome == "partial" and state.reason != "shutdown")
    if state.fingerprint is None or state.run_id is None or not (completed or request.confirmed):
        return
    try:
        runs.remember_predicate(state.run_id, state.fingerprint)
    except PeeweeException as error:
        logger.warning("Could not write the predicate's fingerprint", error=error_line(error))


def _report(request: RunRequest, state: RunState, result: RunResult, io_time: WaitTimes, *, with_alerts: bool) -> None:
    level = logger.error if result.exit_code else logger.info
    level(
        "Run ended",
        **{
            **result.counts,
            "outcome": result.outcome,
            "reason": result.reason,
            "duration_s": round(result.duration_s, 3),
            **io_time.as_fields(),
            "data_consistency_used": data_consistency_used(),
        },
    )
    if result.outcome == "failed" and (message := current_message.get()) is not None:
        message.failed = True
    if result.outcome in ("done", "partial", "failed"):  # a run that lost its lease goes on in another process
        pings.send(result.worker, failed=result.outcome == "failed")
    record_run(request.sweep, result, io_time)
    if with_alerts:
        alerts.send_alerts(request.sweep, result, state.clock)
    structlog.contextvars.unbind_contextvars("run_id")


def _set_open_run(sweep: Sweep) -> None:
    telemetry.OPEN_RUN.set(
        min((at for (worker, _), at in _open_runs.items() if worker == sweep.name), default=0), sweep.name
    )


def record_run(sweep: Sweep, result: RunResult, waited: WaitTimes) -> None:
    """Record the end of a run of any outcome."""
    now = time.time()
    telemetry.RUNS.add(sweep.name, result.outcome)
    with _open_runs_lock:
        has_begun = _open_runs.pop((sweep.name, result.run_id or 0), None) is not None
        _set_open_run(sweep)
    if not has_begun and (result.outcome != "skipped" or result.reason in alerts.HELD_BACK):
        telemetry.LAST_ATTEMPT.set(now, sweep.name)
    if result.outcome == "skipped":
        return
    telemetry.DURATION.observe(result.duration_s, sweep.name)
    telemetry.DATABASE_TIME.add(sweep.name, number=waited.database_s)
    telemetry.REDIS_TIME.add(sweep.name, number=waited.redis_s)
    for name in dict.fromkeys((*alerts.counted_by(sweep), *result.counts)):
        number = result.counts.get(name, 0)  # 0 replaces the number of an earlier run
        if name not in CLOCK_SKEWS.values() and alerts.is_number(number):
            telemetry.ROWS.add(sweep.name, name, number=number)
            telemetry.LAST_RUN_ROWS.set(number, sweep.name, name)
    telemetry.LAST_RUN_DURATION.set(result.duration_s, sweep.name)
    telemetry.LAST_RUN.set(now, sweep.name)
    if result.outcome == "done" or (result.outcome == "partial" and result.reason not in runs.STOPPED):
        telemetry.LAST_SUCCESS.set(now, sweep.name)
