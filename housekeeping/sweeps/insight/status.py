"""How a worker stands: when it last ran and with what outcome, what waits, when it runs next, what rings."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal

from peewee import fn

from housekeeping.core.cron import Cron
from housekeeping.core.sanitize import error_line
from housekeeping.sweeps.declaration import SetupProblem, Sweep
from housekeeping.sweeps.engine.counts import in_order
from housekeeping.sweeps.engine.error_mapping import is_unavailable
from housekeeping.sweeps.engine.rejection_store import Standing, standing
from housekeeping.sweeps.insight.alerts import (
    LOOK_AT,
    UNSEEN,
    Alert,
    backlog_alerts,
    failed_runs_alerts,
    last_run_alerts,
    of_the_first_run,
    overdue_alerts,
    recent_runs_alerts,
    run_alerts,
)
from housekeeping.sweeps.insight.backlog import Backlog, backlog, oldest
from housekeeping.sweeps.insight.run_state import HEARTBEAT_AGE_S
from housekeeping.sweeps.insight.throughput import Rates, last_ended, rates
from housekeeping.sweeps.ledger.models import Run
from housekeeping.sweeps.ledger.overrides import Override, override_of
from housekeeping.sweeps.ledger.runs import STOPPED
from housekeeping.sweeps.stages.stage import as_cursor

State = Literal["on", "paused", "narrow", "disabled", "not_set_up"]


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """A worker at one moment.

    Attributes:
      switch: What an operator said of it: paused or narrowed, until when and why; null: nothing.
      next_tick: UTC; null when it has no schedule, or is disabled.
      last_run: Its newest row in the ledger, as a dictionary; null when it never ran.
      last_success: When a run last did its work, to the end or to its limits; null when none did.
      rates: Records an hour that became stale and that were settled, by the last runs; null: too few to say.
      waiting: The stale rows; null when they could not be seen (`alarms` says why).
      oldest: The first order column of the stale row that is first in order; null when none is stale.
      alarms: What rings, in words.
      rejected: What its last runs could not settle, by argument and cause; the causes with the most rows.
      rejected_more: How many more causes and arguments there are.
      problem: Why the worker is not set up; None when it is.
    """

    worker: str
    state: State
    switch: Override | None
    schedule: str | None
    next_tick: datetime | None
    last_run: dict[str, Any] | None
    last_success: datetime | None
    rates: Rates | None
    waiting: Backlog | None
    oldest: Any
    alarms: list[Alert]
    rejected: Sequence[Standing] = ()
    rejected_more: int = 0
    problem: SetupProblem | None = None

    def as_json(self) -> dict[str, Any]:
        """One element of ``workers`` in ``housekeeping status --json``."""
        first = as_cursor((self.oldest,)) or [None]
        return {
            "worker": self.worker,
            "state": self.state,
            "not_set_up": self.problem.text if self.problem else None,
            "switch": self.switch.as_json() if self.switch else None,
            "schedule": self.schedule,
            "next_tick": self.next_tick.isoformat() if self.next_tick else None,
            "last_run": self.last_run,
            "backlog": self.waiting.rows if self.waiting else None,
            "backlog_exact": self.waiting.exact if self.waiting else None,
            "oldest": first[0],
            "last_success": self.last_success.isoformat() if self.last_success else None,
            "arrived_per_hour": self.rates.arrived if self.rates else None,
            "drained_per_hour": self.rates.drained if self.rates else None,
            "alarms": [alarm.as_json() for alarm in self.alarms],
            "rejected": [each.as_json() for each in self.rejected],
            "rejected_more": self.rejected_more,
        }


def state_of(sweep: Sweep, switch: Override | None, problem: SetupProblem | None = None) -> State:
    """Return whether the worker runs when its time comes, and whether with its own limits."""
    if problem is not None:
        return "not_set_up"
    return "disabled" if not sweep.enabled else switch.state if switch is not None else "on"


def next_tick(sweep: Sweep, now: datetime, zone: Any) -> datetime | None:
    """When the schedule fires next, in UTC; None without one."""
    return Cron(sweep.schedule, zone).next(now) if sweep.schedule and sweep.enabled else None


def worker_status(sweep: Sweep, now: datetime, zone: Any) -> WorkerStatus:
    """Look at a worker: three index probes and a bounded count.

    What keeps the rows of this worker from being counted is an alert of this worker, and hides no other: a predicate
    that fails, a missing table, a lock that is held, another store that does not answer. A disabled worker has no use
    for them.

    Raises:
      peewee.PeeweeException, DatabaseUnavailable: The database does not answer.
    """
    last = last_run(sweep)
    problem = sweep.lacks()
    if problem is not None:
        return _not_set_up(sweep, last, problem)
    waiting, first = None, None
    rings: list[Alert] = []
    try:
        waiting = backlog(sweep, now, sweep.alerts.backlog or LOOK_AT)
        first = oldest(sweep, now)
        rings += backlog_alerts(sweep, waiting)
    except Exception as error:
        if is_unavailable(error):
            raise
        if sweep.enabled:
            rings.append(Alert("unseen", f"{UNSEEN}: {error_line(error)}"))
    switch = override_of(sweep.name)
    rejected, rejected_more = standing(sweep.name)
    return WorkerStatus(
        sweep.name,
        state_of(sweep, switch),
        switch,
        sweep.schedule,
        next_tick(sweep, now, zone),
        last,
        _last_success(sweep),
        rates(last_ended(sweep)),
        waiting,
        first,
        [*rings, *_alarms(sweep, switch, last, now, zone)],
        rejected,
        rejected_more,
    )


def _not_set_up(sweep: Sweep, last: dict[str, Any] | None, problem: SetupProblem) -> WorkerStatus:
    return WorkerStatus(
        sweep.name,
        "not_set_up",
        override_of(sweep.name),
        sweep.schedule,
        None,
        last,
        _last_success(sweep),
        rates=None,
        waiting=None,
        oldest=None,
        alarms=[],
        rejected=[],
        rejected_more=0,
        problem=problem,
    )


def _alarms(
    sweep: Sweep, switch: Override | None, last: dict[str, Any] | None, now: datetime, zone: Any
) -> Iterator[Alert]:
    """What the ledger says of the worker's last runs."""
    if last is None:
        return
    started_at = datetime.fromisoformat(last["started_at"])
    # A run at work may be too long already.
    spent = last["duration_s"] if last["outcome"] else (now - started_at).total_seconds()
    yield from run_alerts(sweep, spent, last["counts"])
    yield from last_run_alerts(last["outcome"], last["error"] or last["reason"])
    yield from of_the_first_run(last["reason"], last["counts"])
    yield from failed_runs_alerts(sweep)
    yield from recent_runs_alerts(sweep)
    if sweep.schedule and state_of(sweep, switch) in ("on", "narrow"):
        cron = Cron(sweep.schedule, zone)
        began: Any = Run.select(fn.MAX(Run.started_at)).where((Run.worker == sweep.name) & (Run.outcome != "missed"))
        yield from overdue_alerts(sweep, began.scalar(), now, cron.period(now).total_seconds())


def _last_success(sweep: Sweep) -> datetime | None:
    well = (Run.outcome == "done") | ((Run.outcome == "partial") & (Run.reason.not_in(STOPPED)))
    last = Run.select(Run.finished_at).where((Run.worker == sweep.name) & well).order_by(Run.id.desc()).limit(1).first()
    return None if last is None else last.finished_at


def last_run(sweep: Sweep) -> dict[str, Any] | None:
    """Return the worker's newest row in the ledger.

    `outcome` is None while the run is open; `heartbeat_age_s` then says whether it is running or lost.
    """
    found = Run.select(Run, HEARTBEAT_AGE_S.alias("heartbeat_age_s")).where(Run.worker == sweep.name)
    run: Any = found.order_by(Run.id.desc()).limit(1).first()
    if run is None:
        return None
    ended = run.finished_at
    return {
        "run_id": run.id,
        "outcome": run.outcome,
        "reason": run.reason,
        "trigger": run.trigger,
        "tick": run.tick.isoformat() if run.tick else None,
        "started_at": run.started_at.isoformat(),
        "duration_s": round((ended - run.started_at).total_seconds(), 3) if ended else None,
        "counts": in_order(sweep, run.counts),
        "error": run.error,
        "heartbeat_age_s": None if run.outcome else round(float(run.heartbeat_age_s), 3),
    }
