"""Prometheus metrics of a sweep's runs."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, get_args

from housekeeping.core.cron import Cron
from housekeeping.core.telemetry import metrics
from housekeeping.core.telemetry.context import WaitTimes
from housekeeping.database.clock_skew import TOLERATED
from housekeeping.sweeps.declaration import Sweep
from housekeeping.sweeps.engine.counts import CLOCK_SKEW
from housekeeping.sweeps.engine.results import RunResult
from housekeeping.sweeps.ledger.runs import STOPPED, Outcome
from housekeeping.sweeps.stages.stage import Backlog

if TYPE_CHECKING:
    from housekeeping.sweeps.insight.alerts import Alert

OUTCOMES: tuple[str, ...] = tuple(outcome for outcome in get_args(Outcome) if outcome not in ("lost", "missed"))


def declare(sweep: Sweep, cron: Cron | None) -> None:
    """Export a worker's metrics as 0 before its first run, so that ``increase()`` counts even the first error.

    Parameters:
      cron: Its schedule; None if it has none.
    """
    metrics.WAITING_SINCE.set(time.time(), sweep.name)
    for outcome in OUTCOMES:
        metrics.RUNS.add(sweep.name, outcome, number=0)
    for name in _counted(sweep):
        metrics.ROWS.add(sweep.name, name, number=0)
    for alert in _alerts_of_run_end(sweep):
        metrics.ALARM.set(0, sweep.name, alert)
    for alert, limit in _limits(sweep, cron):
        metrics.ALARM_LIMIT.set(limit, sweep.name, alert)


def clock_skew(sweep: Sweep, ahead_s: float) -> None:
    """Set the metric of how far this machine's clock is ahead of the database's."""
    metrics.CLOCK_SKEW.set(ahead_s, sweep.name)


def ended(sweep: Sweep, result: RunResult, waited: WaitTimes) -> None:
    """Record a run of any outcome."""
    now = time.time()
    metrics.RUNS.add(sweep.name, result.outcome)
    metrics.LAST_ATTEMPT.set(now, sweep.name)
    if result.outcome == "skipped":
        return
    metrics.DURATION.observe(result.duration_s, sweep.name)
    metrics.DATABASE_TIME.add(sweep.name, number=waited.database_s)
    metrics.REDIS_TIME.add(sweep.name, number=waited.redis_s)
    for name in dict.fromkeys((*_counted(sweep), *result.counts)):
        number = result.counts.get(name, 0)  # 0 replaces the number of an earlier run
        if name != CLOCK_SKEW and _is_number(number):
            metrics.ROWS.add(sweep.name, name, number=number)
            metrics.LAST_RUN_ROWS.set(number, sweep.name, name)
    metrics.LAST_RUN_DURATION.set(result.duration_s, sweep.name)
    metrics.LAST_RUN.set(now, sweep.name)
    if result.outcome == "done" or (result.outcome == "partial" and result.reason not in STOPPED):
        metrics.LAST_SUCCESS.set(now, sweep.name)


def record_backlog(sweep: Sweep, waiting: Backlog, oldest: Any, now: datetime) -> None:
    """Record the backlog after a run.

    Parameters:
      oldest: The oldest stale row's first order column; recorded if it is a time.
    """
    # A count that stopped at its limit means at least one row more.
    metrics.BACKLOG.set(waiting.rows + (not waiting.exact), sweep.name)
    if not waiting.rows:
        metrics.OLDEST.set(0, sweep.name)
    elif isinstance(oldest, datetime):
        since = oldest if oldest.tzinfo else oldest.replace(tzinfo=UTC)
        metrics.OLDEST.set((now - since).total_seconds(), sweep.name)


def record_alerts(sweep: Sweep, alerts: Iterable[Alert], *, clear_others: bool = True) -> None:
    """Set these alerts, and clear the worker's others unless `clear_others` is False."""
    active = {alert.name for alert in alerts}
    for name in {*(_alerts_of_run_end(sweep) if clear_others else ()), *active}:
        metrics.ALARM.set(name in active, sweep.name, name)


def _counted(sweep: Sweep) -> Iterator[str]:
    """Yield the counts that are numbers, with ``failed``, which every worker has."""
    numbers = (name for name in sweep.counts if name not in ("out_of_time", "execution_timeout"))
    yield from dict.fromkeys((*numbers, "failed"))


def _alerts_of_run_end(sweep: Sweep) -> Iterator[str]:
    yield from ("failed_rows", "last_run", "clock", "breaker", "throttled")
    yield from (f"most_{name}" for name in sweep.alerts.most)
    if sweep.confirm_first_run:
        yield "unconfirmed"
    if sweep.alerts.longest_run is not None:
        yield "longest_run"
    if sweep.alerts.failed_runs is not None:
        yield "failed_runs"
    if sweep.argument_name is None:
        yield "unseen"
        if sweep.alerts.backlog is not None:
            yield "backlog"


def _limits(sweep: Sweep, cron: Cron | None) -> Iterator[tuple[str, float]]:
    thresholds = sweep.alerts
    yield "failed_rows", 0
    yield "clock", TOLERATED.total_seconds()
    yield from ((f"most_{name}", most) for name, most in thresholds.most.items())
    if thresholds.longest_run is not None:
        yield "longest_run", thresholds.longest_run.total_seconds()
    if thresholds.backlog is not None and sweep.argument_name is None:
        yield "backlog", thresholds.backlog
    if thresholds.failed_runs is not None:
        yield "failed_runs", thresholds.failed_runs
    if thresholds.overdue is not None and cron is not None:
        yield "overdue", thresholds.overdue * cron.period(datetime.now(UTC)).total_seconds()


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
