"""One run of a sweep, from the question whether it may begin to the line that says how it ended."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import datetime, timedelta
from typing import Any, NoReturn

import structlog
from dramatiq.middleware import Shutdown
from peewee import PeeweeException

from housekeeping.core.clock import SYSTEM_CLOCK, Clock, RunBudget, ServerClock
from housekeeping.core.errors import (
    BreakerTripped,
    ClocksDiffer,
    LeaseLost,
    RunTakenOver,
    SchemaMissing,
)
from housekeeping.core.sanitize import error_line
from housekeeping.core.telemetry.error_reporting import report
from housekeeping.core.telemetry.io_timing import wait_times
from housekeeping.core.telemetry.logs import logger as named_logger
from housekeeping.core.telemetry.message_context import MessageContext, current_message
from housekeeping.core.thread_interrupt import LostLease, run_interruptibly, run_shielded
from housekeeping.database.clock_skew import ClockSkew
from housekeeping.database.replicas import data_consistency_used
from housekeeping.leases.lease import ExclusiveLease
from housekeeping.sweeps.checks.references import warn_of_references
from housekeeping.sweeps.declaration import Sweep
from housekeeping.sweeps.engine import run_metrics
from housekeeping.sweeps.engine.counts import CLOCK_SKEW, initial_counts
from housekeeping.sweeps.engine.error_mapping import classify_error, is_unreachable, reason_of
from housekeeping.sweeps.engine.executor import Executor
from housekeeping.sweeps.engine.rejection_store import subject_of
from housekeeping.sweeps.engine.results import RunResult
from housekeeping.sweeps.engine.run_lease import held, tell_who_holds
from housekeeping.sweeps.insight.alerts import breaker_alerts, send_alerts
from housekeeping.sweeps.ledger import runs
from housekeeping.sweeps.ledger.overrides import Override, override_of
from housekeeping.sweeps.ledger.runs import Counts, Outcome, PastRun, Resume, Trigger
from housekeeping.sweeps.limits.breaker import check, settled_by, usual_rows
from housekeeping.sweeps.limits.confirmation import Confirmation
from housekeeping.sweeps.limits.db_health import HealthSource
from housekeeping.sweeps.limits.first_run import UNCONFIRMED, check_first_run
from housekeeping.sweeps.stages.stage import PreflightResult

logger = named_logger(__name__)

#: How a run ended, why, and what broke it off.
_End = tuple[Outcome, str | None, BaseException | None]


class _NotConfirmed(Exception):
    """Ends a worker's first run before its first change, until a person confirms one."""


class _Ended(Exception):
    """Ends a run before it began: how and why, and whether the ledger is to say so."""

    def __init__(
        self, outcome: Outcome, reason: str, *, recorded: bool = True, again_after: timedelta | None = None
    ) -> None:
        super().__init__(reason)
        self.again_after = again_after
        self.outcome = outcome
        self.reason = reason
        self.recorded = recorded


def run_sweep(
    sweep: Sweep,
    argument: Any = None,
    *,
    clock: Clock | None = None,
    force: bool = False,
    on_batch: Callable[[Counts], None] | None = None,
    stopping: threading.Event | None = None,
    confirmation: Confirmation | None = None,
    health: HealthSource | None = None,
    on_begin: Callable[[int], None] | None = None,
) -> RunResult:
    """Run a sweep once, recorded in the ledger, and say what it did; never raises for a failed run.

    Within a message the run takes its id, tick and trigger; otherwise its trigger is ``cli``.

    Parameters:
      argument: What the run is about, for a worker that takes an argument.
      clock: Decides what is stale, for tests; the database's clock unless given.
      force: Run although the worker is paused or overrides off, or this machine's clock is wrong.
      on_batch: Told the counts after each committed batch.
      stopping: Ends the run after the batch in hand once it is set; the message's own unless given. With one given, a
        run that `Shutdown` interrupts returns its result, too.
      confirmation: A person's word that it may touch far more than usual.
      health: Where the signs of the gates come from; the database's own views unless given.
      on_begin: Called with the id of the run's row once that is there.
    """
    run = _Runner(sweep, argument, clock, current_message.get(), on_batch, stopping)
    run.force, run.confirmation, run.health, run.on_begin = force, confirmation, health, on_begin
    return run.result()


class _Runner:
    """A run in the making: what it is for, and what it has done so far."""

    def __init__(
        self,
        sweep: Sweep,
        argument: Any,
        clock: Clock | None,
        message: MessageContext | None,
        on_batch: Callable[[Counts], None] | None,
        stopping: threading.Event | None,
    ) -> None:
        self.sweep = sweep
        self.argument = argument
        self.given_clock = clock
        self.clock = clock or SYSTEM_CLOCK
        self.on_batch = on_batch
        self.message_id = message.message_id if message else None
        self.tick = message.tick if message else None
        self.trigger: Trigger = message.trigger if message else "cli"
        self.stopped_by_caller = stopping is not None
        self.stopping = stopping or (message.stopping if message else threading.Event())
        self.run_id: int | None = None
        self.started_at = self.clock.now()
        self.counts = initial_counts(sweep)
        self.preflight = PreflightResult()
        self.again_after: timedelta | None = None
        self.force = False
        self.confirmation: Confirmation | None = None
        self.health: HealthSource | None = None
        self.on_begin: Callable[[int], None] | None = None
        self.switch: Override | None = None
        self.interrupt: BaseException | None = None
        self.walk: Executor | None = None
        self.saw_everything = False
        self.rejected_before = False
        self.waited = wait_times()

    def result(self) -> RunResult:
        """Run, and end the run whatever happens: who interrupts it waits until it has written how it ended."""
        return run_shielded(self._result)

    def _result(self) -> RunResult:
        budget = RunBudget(self.sweep.max_runtime, self.clock)
        with structlog.contextvars.bound_contextvars(worker=self.sweep.name, message_id=self.message_id):
            outcome, reason, error = self._ended(budget)
            result = RunResult(
                self.sweep.name,
                outcome,
                reason,
                self.run_id,
                self.started_at,
                budget.spent(),
                self.counts,
                error=error,
                again_after=self.again_after,
            )
            self._close_rejections(outcome)
            self._log(result)
        if self.interrupt is not None:
            raise self.interrupt  # not ours to swallow
        return result

    def _ended(self, budget: RunBudget) -> _End:
        try:
            outcome, reason = run_interruptibly(self._after_preflight, budget)
            return outcome, reason, None
        except _Ended as ended:
            unwritten = self._record(ended.outcome, ended.reason) if ended.recorded else None
            if unwritten is not None and self.tick is not None:
                return "failed", reason_of(unwritten), unwritten  # to be tried again: a tick has an outcome
            self.again_after = ended.again_after
            return ended.outcome, ended.reason, None
        except _NotConfirmed:
            outcome, reason, _ = self._broken_off("skipped", UNCONFIRMED, None)
            return outcome, reason, self.preflight.error
        except BreakerTripped as error:
            logger.error("Breaker tripped", error=str(error))
            outcome, reason, broken = self._broken_off("failed", "breaker", error)
            return outcome, reason, self.preflight.error or broken
        except (LeaseLost, RunTakenOver, LostLease) as error:
            reason = "taken_over" if isinstance(error, RunTakenOver) else "lease_lost"
            return self._broken_off("lost_lease", reason, error)
        except Shutdown as error:
            # A caller that stops the run itself expects the result.
            self.interrupt = None if self.stopped_by_caller else error
            return self._broken_off("partial", "shutdown", error)
        except BaseException as error:
            outcome, reason, broken = self._broken_off("failed", reason_of(error), error)
            if not isinstance(error, Exception):
                self.interrupt = error
                return outcome, reason, broken
            if broken is None:
                return outcome, reason, None
            error = classify_error(error)
            reason = str(error) if isinstance(error, SchemaMissing) else reason
            report(error, worker=self.sweep.name, run_id=self.run_id, message_id=self.message_id)
            return "failed", reason, error

    def _after_preflight(self, budget: RunBudget) -> tuple[Outcome, str | None]:
        try:
            self._refuse_when_off()
        except PeeweeException:
            # Whether the worker is paused is unknown; the ledger must not decide over the work before the lease.
            self._do_before_lease()
            raise
        self._do_before_lease()
        return self._under_its_lease(budget)

    def _do_before_lease(self) -> None:
        if self.sweep.before_lease is not None:
            self.preflight = self.sweep.before_lease.carry_out()
            self.counts |= self.preflight.counts

    def _under_its_lease(self, budget: RunBudget) -> tuple[Outcome, str | None]:
        with held(self.sweep, self.argument, self.message_id, self._end_without) as lease:
            return self._walk(budget, lease)

    def _refuse_when_off(self) -> None:
        if not (self.sweep.enabled or self.force):
            raise _Ended("skipped", "disabled")
        self.switch = override_of(self.sweep.name)
        if self.switch is not None and self.switch.state == "paused" and not self.force:
            raise _Ended("skipped", "paused")
        problem = self.sweep.lacks()
        if problem is not None:
            logger.info("Worker not set up", family=problem.family, text=problem.text)
            raise _Ended("skipped", "not_set_up")

    def _end_without(self, lease: ExclusiveLease) -> NoReturn:
        tell_who_holds(lease)
        if self.message_id is not None and runs.is_unfinished(self.message_id):
            # Delivered again sooner than its dead attempt counts as silent: to end here would lose its work.
            raise _Ended("skipped", "lease_held", recorded=False, again_after=runs.HEARTBEAT)
        if self.preflight.error is not None:
            raise self.preflight.error
        raise _Ended("skipped", "lease_held")

    def _walk(self, budget: RunBudget, lease: tuple[ExclusiveLease, str] | None) -> tuple[Outcome, str | None]:
        attempt = runs.begin(
            self.sweep.name,
            message_id=self.message_id,
            tick=self.tick,
            trigger=self.trigger,
            lease=(lease[0].key, lease[1]) if lease else None,
            resume=self._resume(),
            subject=subject_of(self.argument),
            counts=self.preflight.counts,
        )
        if attempt is None:
            raise _Ended("skipped", "already_done", recorded=False)
        self._recorded_as(attempt.run_id, attempt.started_at)
        self.rejected_before = attempt.rejected
        if self.on_begin is not None:
            self.on_begin(attempt.run_id)
        structlog.contextvars.bind_contextvars(run_id=self.run_id)
        logger.info("Run started", trigger=self.trigger, tick=self.tick, resumed=attempt.cursor is not None)
        if self.sweep.start_message is not None:
            logger.info(self.sweep.start_message)
        self._compare_clocks(attempt.clock_skew)
        self.walk = walk = Executor(
            self.sweep,
            attempt.run_id,
            self.given_clock.now() if self.given_clock else attempt.started_at,
            budget,
            self.stopping,
            attempt.cursor,
            self.argument,
            (lease[0], attempt.epoch) if lease and attempt.epoch is not None else None,
            self.on_batch,
            self.switch,
            not self.force,
            self.clock,
            self.health,
            self.preflight,
        )
        walk.counts |= self.counts
        self._check_first_run(walk)
        if not attempt.history:
            warn_of_references(walk.stages)
        self._ask_breaker(walk, attempt.history)
        if self.confirmation is not None:
            walk.counts["confirmed"] = True
        try:
            verdict = walk.go()
            self.saw_everything = verdict[0] == "done" and walk.saw_everything()
            return verdict
        finally:
            self.counts = walk.counts

    def _recorded_as(self, run_id: int, started_at: datetime) -> None:
        """Note the run's row; from here on the database's clock decides, unless another one is given."""
        self.run_id, self.started_at = run_id, started_at
        if self.given_clock is None:
            self.clock = ServerClock(started_at)

    def _compare_clocks(self, skew: ClockSkew) -> None:
        """Refuse to run on a machine whose clock is far from the database's, unless forced."""
        run_metrics.clock_skew(self.sweep, skew.seconds)
        if not skew.exceeded:
            return
        self.counts[CLOCK_SKEW] = skew.seconds
        if skew.refused and not self.force:
            raise ClocksDiffer(f"clocks differ, nothing was changed: {skew}")
        logger.warning("Clocks differ", ahead_s=skew.seconds, text=str(skew))

    def _check_first_run(self, walk: Executor) -> None:
        """End the run when it is the worker's first, would process a large part of a table, and is not confirmed."""
        found = check_first_run(self.sweep, walk.stages, walk.now, self.argument, self.confirmation)
        if found is None:
            return
        self.counts[UNCONFIRMED] = found.as_count()
        raise _NotConfirmed

    def _ask_breaker(self, walk: Executor, history: Sequence[PastRun]) -> None:
        """Alert where far more is stale than usual, and let the breaker limit or stop the run where it is set to."""
        loads = usual_rows(history, self.sweep.progress_counts)
        verdict = check(self.sweep, loads, walk.stages, walk.now, self.argument, self.confirmation)
        if verdict is None:
            return
        walk.row_limit = verdict.row_limit
        if not verdict.exceeded:
            return
        said = walk.counts["breaker"] = self.counts["breaker"] = verdict.as_count()
        run_metrics.record_alerts(self.sweep, breaker_alerts(self.sweep, walk.counts), others="as they were")
        if verdict.action == "stop":
            raise BreakerTripped(verdict.refusal)
        logger.warning("Breaker exceeded", action=said["action"], stale=said["stale"], allowed=said["allowed"])

    def _resume(self) -> Resume:
        # A cursor says nothing to a run about another argument.
        if self.sweep.argument_name is not None or self.sweep.ignore_cursor:
            return "never"
        return "cut_short" if self.sweep.resume_after_limit else "interrupted"

    def _record(self, outcome: Outcome, reason: str) -> PeeweeException | None:
        """Write a row of a run that did not begin; returns what kept the database from taking it."""
        try:
            row = runs.record(
                self.sweep.name,
                outcome,
                reason,
                message_id=self.message_id,
                tick=self.tick,
                trigger=self.trigger,
                counts=self.preflight.counts,
            )
        except PeeweeException as error:
            logger.error("Could not record the run", outcome=outcome, error=error_line(error))
            return error
        self._recorded_as(*row)
        return None

    def _broken_off(self, outcome: Outcome, reason: str, error: BaseException | None) -> _End:
        """Close the row as far as the database can be reached (if not, the next run marks it lost); the end it has."""
        if self.run_id is None:
            if error is None or not is_unreachable(error):
                self._record(outcome, reason)
            return outcome, reason, error
        try:
            extra: Counts = {
                name: self.counts[name]
                for name in ("failed", "breaker", UNCONFIRMED, CLOCK_SKEW)
                if name in self.counts
            }
            # To be stopped, or to wait for a confirmation, is no error.
            text = None if error is None or isinstance(error, Shutdown) else error_line(error)
            closed = runs.fail(self.run_id, outcome, reason, text, extra)
        except PeeweeException as again:
            logger.error("Could not close the run", outcome=outcome, error=error_line(again))
            return outcome, reason, error
        self.counts = {**initial_counts(self.sweep), **closed.counts}
        if closed.outcome in ("done", "partial") and closed.outcome != outcome:
            # Its last batch was committed, and only the answer was lost, or the lease after it.
            logger.warning("Run had ended before it broke off", error=text)
            return closed.outcome, closed.reason, None
        if outcome == "lost_lease" and closed.outcome == "lost":
            return outcome, "taken_over", RunTakenOver(f"run {self.run_id} has been taken over")
        return outcome, reason, LeaseLost(str(error)) if isinstance(error, LostLease) else error

    def _close_rejections(self, outcome: Outcome) -> None:
        """Log, record and report what the run rejected, however it ended."""
        if self.walk is None:
            return
        self.walk.rejections.close(
            whole=self.saw_everything and outcome == "done",
            settled_any=bool(settled_by(self.counts, self.sweep.progress_counts)),
            rejected_before=self.rejected_before,
            position=self.walk.reached,
        )

    def _log(self, result: RunResult) -> None:
        spent = wait_times().since(self.waited)
        line = {
            **result.counts,
            "outcome": result.outcome,
            "reason": result.reason,
            "duration_s": round(result.duration_s, 3),
            **spent.as_fields(),
            "data_consistency_used": data_consistency_used(),
        }
        level = logger.error if result.exit_code else logger.info
        level("Run ended", **line)
        run_metrics.ended(self.sweep, result, spent)
        if self.interrupt is None:
            send_alerts(self.sweep, result, self.clock)
        structlog.contextvars.unbind_contextvars("run_id")
