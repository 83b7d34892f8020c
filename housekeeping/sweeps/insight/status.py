"""Status of a worker: last run, backlog, next tick and alerts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any

from peewee import fn

from housekeeping.core.cron import Cron
from housekeeping.core.sanitize import error_line
from housekeeping.core.settings import MAIN
from housekeeping.core.wording import format_duration
from housekeeping.database.errors import is_unavailable
from housekeeping.database.time_limit import LOCK_TIME, STATEMENT_TIME, time_limit
from housekeeping.sweeps.declaration import Sweep
from housekeeping.sweeps.engine.counts import in_order
from housekeeping.sweeps.engine.failures.rejection_store import Standing, standing
from housekeeping.sweeps.insight.alert_times import with_times
from housekeeping.sweeps.insight.alerts import (
    DEFAULT_COUNT_LIMIT,
    UNKNOWN_BACKLOG,
    Alert,
    backlog_alerts,
    failed_runs_alerts,
    first_run_alerts,
    last_run_alerts,
    overdue_alerts,
    recent_runs_alerts,
    run_alerts,
)
from housekeeping.sweeps.insight.backlog import Ended, Rates, backlog, held, last_ended, oldest, rates
from housekeeping.sweeps.insight.state import State, next_tick, state_of
from housekeeping.sweeps.ledger import history, runs
from housekeeping.sweeps.ledger.models import Run
from housekeeping.sweeps.ledger.overrides import Override, override_of
from housekeeping.sweeps.ledger.runs import STOPPED
from housekeeping.sweeps.setup_problem import SetupProblem
from housekeeping.sweeps.stages.stage import Backlog, as_cursor


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """Status of a worker at one moment.

    Attributes:
      switch: The override in effect, paused or narrowed; None without one.
      next_tick: In UTC; None without a schedule, or when disabled or paused without an end.
      last_run: The newest row in the ledger as a dictionary; None when it never ran.
      last_success: The end of the last run that reached its end or its limits; None without one.
      rates: Rows per hour that became stale and that were processed, by the last runs; None if too few runs.
      waiting: The stale rows; None when they were never counted.
      counted_at: When they were counted, if that was not now; `alarms` has the reason.
      held: The stale rows that stay because they are on hold; None if the worker has no hold, or they could not be
        counted.
      oldest: The oldest stale row's first order column; None without stale rows.
      alarms: The active alerts.
      rejected: Rejections of the last runs by argument and cause, most rows first.
      rejected_more: The number of further causes and arguments.
      problem: Why the worker is not set up; None when it is.
      ended: Its last runs that ended, oldest first.
      database: Name of its database.
    """

    worker: str
    state: State
    switch: Override | None
    schedule: str | None
    last_run: dict[str, Any] | None
    last_success: datetime | None
    problem: SetupProblem | None = None
    next_tick: datetime | None = None
    rates: Rates | None = None
    waiting: Backlog | None = None
    counted_at: datetime | None = None
    held: Backlog | None = None
    oldest: Any = None
    alarms: list[Alert] = field(default_factory=list)
    rejected: Sequence[Standing] = ()
    rejected_more: int = 0
    ended: Sequence[Ended] = ()
    database: str = MAIN

    def as_json(self) -> dict[str, Any]:
        """Return one element of ``workers`` in ``housekeeping status --json``."""
        first = as_cursor((self.oldest,)) or [None]
        values = {
            "worker": self.worker,
            "state": self.state,
            "not_set_up": self.problem.text if self.problem else None,
            "switch": self.switch.as_json() if self.switch else None,
            "schedule": self.schedule,
            "next_tick": self.next_tick.isoformat() if self.next_tick else None,
            "last_run": self.last_run,
            "backlog": self.waiting.rows if self.waiting else None,
            "backlog_exact": self.waiting.exact if self.waiting else None,
            "backlog_counted_at": self.counted_at.isoformat() if self.counted_at else None,
            "held": self.held.rows if self.held else None,
            "held_exact": self.held.exact if self.held else None,
            "oldest": first[0],
            "last_success": self.last_success.isoformat() if self.last_success else None,
            "arrived_per_hour": self.rates.arrived if self.rates else None,
            "drained_per_hour": self.rates.drained if self.rates else None,
            "alarms": [alert.as_json() for alert in self.alarms],
            "rejected": [each.as_json() for each in self.rejected],
            "rejected_more": self.rejected_more,
        }
        return history.name_database(values, self.database)


def worker_status(sweep: Sweep, now: datetime, zone: Any, *, count: bool = True) -> WorkerStatus:
    """Return a worker's status, by three index probes and a bounded count.

    If the backlog cannot be counted, for example because the table is locked, that is an alert of this worker. The
    status then has the backlog at the end of an earlier run. A disabled worker gets no such alert.

    Parameters:
      count: Whether there is time to read the application's tables. Without it, the status is as if they were locked.

    Raises:
      peewee.PeeweeException, DatabaseUnavailable: The database does not answer.
    """
    last, problem, switch, ended = last_run(sweep), sweep.lacks(), override_of(sweep.name), last_ended(sweep)
    status = WorkerStatus(
        sweep.name,
        state_of(sweep, switch, problem),
        switch,
        sweep.schedule,
        last,
        _last_success(sweep),
        problem,
        ended=ended,
        database=sweep.database,
    )
    if problem is not None:
        return status
    waiting, counted_at, first, on_hold = None, None, None, None
    alerts: list[Alert] = []
    try:
        if not count:
            raise TimeoutError("the other workers' tables took too long")
        limit = sweep.alerts.backlog or DEFAULT_COUNT_LIMIT
        with time_limit(STATEMENT_TIME, LOCK_TIME):
            waiting = backlog(sweep, now, limit)
            first = oldest(sweep, now)
            on_hold = held(sweep, now, limit)
        alerts += backlog_alerts(sweep, waiting)
    except Exception as error:
        if is_unavailable(error):
            raise
        waiting, counted_at = _last_counted(ended)
        if sweep.enabled:
            alerts.append(Alert("unseen", f"{UNKNOWN_BACKLOG}: {error_line(error)}"))
    rejected, rejected_more = standing(sweep.name)
    return replace(
        status,
        next_tick=next_tick(sweep, now, zone, switch),
        rates=rates(ended),
        waiting=waiting,
        counted_at=counted_at,
        held=on_hold,
        oldest=first,
        alarms=with_times(sweep, [*alerts, *_last_run_alerts(sweep, switch, last, now, zone)], ended, now),
        rejected=rejected,
        rejected_more=rejected_more,
    )


def _last_counted(ended: Sequence[Ended]) -> tuple[Backlog | None, datetime | None]:
    """Return the last backlog in the ledger, and when it was counted."""
    for run in reversed(ended):
        if run.backlog is not None:
            return Backlog(run.backlog, exact=bool(run.backlog_exact)), run.finished_at
    return None, None


def _last_run_alerts(
    sweep: Sweep, switch: Override | None, last: dict[str, Any] | None, now: datetime, zone: Any
) -> Iterator[Alert]:
    """Yield the alerts that the ledger shows."""
    if last is None:
        return
    started_at = datetime.fromisoformat(last["started_at"])
    # An open run may be over its time already.
    duration_s = last["duration_s"] if last["outcome"] else (now - started_at).total_seconds()
    yield from run_alerts(sweep, duration_s, last["counts"])
    yield from last_run_alerts(last["outcome"], last["error"] or last["reason"])
    yield from first_run_alerts(last["reason"], last["counts"])
    yield from failed_runs_alerts(sweep)
    yield from recent_runs_alerts(sweep)
    is_running = last["outcome"] is None and not is_lost(None, last["heartbeat_age_s"])
    if sweep.schedule and not is_running and state_of(sweep, switch) in ("on", "narrow"):
        cron = Cron(sweep.schedule, zone)
        was_run = Run.outcome.is_null() | (Run.outcome != "missed")
        of_worker = Run.worker == sweep.name
        began: Any = Run.select(fn.MAX(Run.started_at)).where(of_worker & was_run).scalar()
        # A worker whose ticks were all missed has never run.
        known: Any = began or Run.select(fn.MIN(Run.started_at)).where(of_worker).scalar()
        yield from overdue_alerts(sweep, known, now, cron.period(now).total_seconds())


def _last_success(sweep: Sweep) -> datetime | None:
    succeeded = (Run.outcome == "done") | ((Run.outcome == "partial") & (Run.reason.not_in(STOPPED)))
    last = Run.select(Run.finished_at).where((Run.worker == sweep.name) & succeeded).order_by(Run.id.desc())
    ended_at: datetime | None = last.limit(1).scalar()
    return ended_at


def last_run(sweep: Sweep) -> dict[str, Any] | None:
    """Return the worker's newest row in the ledger.

    `outcome` is None while the run is open; `heartbeat_age_s` then says whether it is running or lost.
    """
    for run in history.recent(sweep.name, 1):
        return {
            "run_id": run.run_id,
            "outcome": run.outcome,
            "reason": run.reason,
            "trigger": run.trigger,
            "tick": run.tick.isoformat() if run.tick else None,
            "started_at": run.started_at.isoformat(),
            "duration_s": None if run.duration_s is None else round(run.duration_s, 3),
            "counts": in_order(sweep, run.counts),
            "error": run.error,
            "heartbeat_age_s": None if run.silent_s is None else round(run.silent_s, 3),
            "maybe_lost": run.lost,
        }
    return None


def is_lost(outcome: str | None, heartbeat_age_s: float | None) -> bool:
    """Return whether a run is open and has missed three heartbeats."""
    return outcome is None and heartbeat_age_s is not None and heartbeat_age_s > runs.SILENCE.total_seconds()


def outcome_in_words(outcome: str | None, heartbeat_age_s: float | None) -> str:
    """Return a run's outcome; of an open run whether it is running or lost.

    Parameters:
      heartbeat_age_s: The age of its last heartbeat in seconds; None if unknown.
    """
    if is_lost(outcome, heartbeat_age_s):
        return f"lost? no heartbeat for {format_duration(heartbeat_age_s)}"
    return outcome or "running"
