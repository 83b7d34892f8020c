"""One run of a sweep: preflight, lease, ledger row, batches, end. Read `_run` first."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import structlog
from dramatiq.middleware import Shutdown
from peewee import PeeweeException

from housekeeping.core.clock import Clock, RunBudget
from housekeeping.core.errors import BreakerTripped, ClocksDiffer
from housekeeping.core.settings import MAIN
from housekeeping.core.telemetry.context import WaitTimes, current_message, wait_times
from housekeeping.core.telemetry.logs import logger as named_logger
from housekeeping.core.thread_interrupt import LostLease, run_interruptibly, run_shielded
from housekeeping.database.clock_skew import ClockSkew
from housekeeping.database.connection import database
from housekeeping.database.replicas.routing import data_consistency_used
from housekeeping.sweeps.checks.archives import require_archives
from housekeeping.sweeps.checks.references import warn_of_references
from housekeeping.sweeps.checks.unique_keys import stages_of
from housekeeping.sweeps.declaration import Sweep
from housekeeping.sweeps.engine import run_metrics
from housekeeping.sweeps.engine.counts import CLOCK_SKEW
from housekeeping.sweeps.engine.executor import Executor
from housekeeping.sweeps.engine.failures.rejection_store import subject_of
from housekeeping.sweeps.engine.failures.rejections import Rejections
from housekeeping.sweeps.engine.results import RunResult
from housekeeping.sweeps.engine.run_context import RunProgress, RunRequest
from housekeeping.sweeps.engine.run_end import RunEnd, close_rejections, end_of_error, record_end, remember_predicate
from housekeeping.sweeps.engine.run_lease import run_lease
from housekeeping.sweeps.insight.alerts import breaker_alerts, send_alerts
from housekeeping.sweeps.ledger import run_queries, run_start, runs
from housekeeping.sweeps.ledger.overrides import Override, override_of
from housekeeping.sweeps.ledger.runs import Counts
from housekeeping.sweeps.limits.breaker import RowLimit, Verdict, check, usual_rows
from housekeeping.sweeps.limits.db_health import HealthSource
from housekeeping.sweeps.limits.first_run import UNCONFIRMED, check_first_run

logger = named_logger(__name__)


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
    health: HealthSource | None = None,
) -> RunResult:
    """Run a sweep once, record it in the ledger, and return its result. A failed run does not raise.

    Within a message the run takes the message's id, tick and trigger; otherwise its trigger is ``cli``.

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
      stopping: Ends the run after the current batch once it is set. Default: the message's own event. With an event
        given, a run that `Shutdown` interrupts returns its result as well.
      health: Source of the database's health for the throttle. Default: the database's own views.
    """
    message = current_message.get()
    request = RunRequest(
        sweep=sweep,
        argument=argument,
        message_id=message.message_id if message else None,
        tick=message.tick if message else None,
        trigger=message.trigger if message else "cli",
        stopping=stopping or (message.stopping if message else threading.Event()),
        returns_on_shutdown=stopping is not None,
        force=force,
        confirmed=confirmed,
        max_rows=max_rows,
        resumes=resumes,
        noted=noted or {},
        clock=clock,
        health=health,
        on_batch=on_batch,
        on_begin=on_begin,
    )
    # An interrupt waits until the end of the run is recorded.
    return run_shielded(_run_and_record, request)


def _run_and_record(request: RunRequest) -> RunResult:
    """Run the sweep, then record and report its end, also after an error."""
    sweep, before = request.sweep, wait_times()
    progress = RunProgress.of(request)
    budget = RunBudget(sweep.max_runtime, progress.clock)
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
            end = run_interruptibly(_run, request, progress, budget)
        except BaseException as error:
            end = end_of_error(error)
            if not isinstance(error, Exception | LostLease):
                interrupt = None if isinstance(error, Shutdown) and request.returns_on_shutdown else error
        end = record_end(request, progress, end)
        result = RunResult(
            sweep.name,
            end.outcome,
            end.reason,
            progress.run_id,
            progress.started_at,
            budget.spent(),
            progress.counts,
            error=end.error,
            retry_after=end.retry_after,
        )
        close_rejections(request, progress, end)
        remember_predicate(request, progress, end)
        _report(request, progress, result, wait_times().since(before), with_alerts=interrupt is None)
    if interrupt is not None:
        raise interrupt
    return result


def _run(request: RunRequest, progress: RunProgress, budget: RunBudget) -> RunEnd:
    """Run the phases of a run in order, and return how it ended."""
    sweep = request.sweep

    # Preflight: is the worker enabled, not paused, and set up?
    if not (sweep.enabled or request.force):
        return RunEnd("skipped", "disabled")
    try:
        override = override_of(sweep.name)
        skip_reason = _reason_to_skip(request, override)
    except PeeweeException:
        # The preflight's work does not depend on the database, so it is done before the run fails.
        progress.carry_out_preflight(sweep)
        raise
    if skip_reason is not None:
        return RunEnd("skipped", skip_reason)
    progress.carry_out_preflight(sweep)

    with run_lease(request) as lease:
        if lease.is_held_elsewhere:
            return _end_without_lease(request, progress)

        # The ledger row, with the fencing token (epoch) of the lease.
        attempt = run_start.begin(
            sweep.name,
            message_id=request.message_id,
            tick=request.tick,
            trigger=request.trigger,
            lease=lease.key_and_token,
            resume=request.resume,
            resumes=request.resumes,
            subject=subject_of(request.argument),
            counts={**progress.preflight.counts, **request.noted},
        )
        if attempt is None:
            return RunEnd("skipped", "already_done", is_recorded=True)
        _report_begin(request, progress, attempt)

        # Limits: the clocks, the first run, the breaker.
        _compare_clocks(request, progress, attempt.clock_skew)
        stages, now = stages_of(sweep), request.clock.now() if request.clock else attempt.started_at
        require_archives(stages)
        progress.rejections = Rejections(sweep.name, attempt.run_id, request.argument)
        first_run = check_first_run(sweep, stages, now, request.argument, confirmed=request.confirmed)
        if first_run.unconfirmed is not None:
            progress.counts[UNCONFIRMED] = first_run.unconfirmed.as_count()
            return RunEnd("skipped", UNCONFIRMED)
        progress.predicate = first_run.fingerprint
        if not attempt.history:
            warn_of_references(stages)
        history = usual_rows(attempt.history, sweep.progress_counts)
        verdict = None if request.confirmed else check(sweep, history, stages, now, request.argument)
        if verdict is not None and verdict.exceeded:
            _report_breaker(sweep, progress, verdict)
            if verdict.action == "stop":
                return RunEnd("failed", "breaker", BreakerTripped(verdict.refusal))
        if request.confirmed:
            logger.info("Run is confirmed")
            progress.counts["confirmed"] = True

        # The batches; the last one closes the row.
        executor = Executor(
            request,
            progress,
            attempt,
            stages,
            now=now,
            budget=budget,
            lease=lease,
            override=override,
            row_limit=_row_limit(request, verdict),
        )
        outcome, reason = executor.run()
        return RunEnd(outcome, reason, is_recorded=True)


def _reason_to_skip(request: RunRequest, override: Override | None) -> str | None:
    if override is not None and override.state == "paused" and not request.force:
        return "paused"
    problem = request.sweep.lacks()
    if problem is None:
        return None
    logger.info("Worker not set up", family=problem.family, text=problem.text)
    return "not_set_up"


def _row_limit(request: RunRequest, verdict: Verdict | None) -> RowLimit | None:
    if request.max_rows is not None:
        return RowLimit(request.max_rows, progress_counts=request.sweep.progress_counts, reason="limit")
    return None if verdict is None else verdict.row_limit


def _end_without_lease(request: RunRequest, progress: RunProgress) -> RunEnd:
    if request.message_id is not None and run_queries.is_unfinished(request.message_id):
        # An earlier attempt at this message has the lease. It is probably dead, but its heartbeats are too recent to
        # tell. If the message ended here, its work would be lost.
        return RunEnd("skipped", "lease_held", retry_after=runs.HEARTBEAT, is_recorded=True)
    if progress.preflight.error is not None:
        raise progress.preflight.error
    return RunEnd("skipped", "lease_held")


def _report_begin(request: RunRequest, progress: RunProgress, attempt: run_start.Attempt) -> None:
    progress.recorded(request, attempt.run_id, attempt.started_at)
    progress.rejected_before = attempt.rejected
    if request.on_begin is not None:
        request.on_begin(attempt.run_id)
    structlog.contextvars.bind_contextvars(run_id=attempt.run_id)
    logger.info("Run started", trigger=request.trigger, tick=request.tick, resumed=attempt.cursor is not None)
    if request.sweep.start_message is not None:
        logger.info(request.sweep.start_message)


def _compare_clocks(request: RunRequest, progress: RunProgress, skew: ClockSkew) -> None:
    """Raise ClocksDiffer if this machine's clock is far from the database's, unless the run is forced."""
    run_metrics.clock_skew(request.sweep, skew.seconds)
    if not skew.exceeded:
        return
    progress.counts[CLOCK_SKEW] = skew.seconds
    if skew.refused and not request.force:
        raise ClocksDiffer(f"clocks differ, nothing was changed: {skew}")
    logger.warning("Clocks differ", ahead_s=skew.seconds, text=str(skew))


def _report_breaker(sweep: Sweep, progress: RunProgress, verdict: Verdict) -> None:
    count = progress.counts["breaker"] = verdict.as_count()
    run_metrics.record_alerts(sweep, breaker_alerts(sweep, progress.counts), clear_others=False)
    if verdict.action == "stop":
        logger.error("Breaker tripped", error=verdict.refusal)
    else:
        logger.warning("Breaker exceeded", action=count["action"], stale=count["stale"], allowed=count["allowed"])


def _report(
    request: RunRequest, progress: RunProgress, result: RunResult, io_time: WaitTimes, *, with_alerts: bool
) -> None:
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
    run_metrics.ended(request.sweep, result, io_time)
    if with_alerts:
        send_alerts(request.sweep, result, progress.clock)
    structlog.contextvars.unbind_contextvars("run_id")
