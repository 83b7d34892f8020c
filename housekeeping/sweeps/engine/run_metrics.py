"""What a run of a sweep leaves in the metrics, by the names that its worker's document has for its counts."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from typing import Any, Literal, Protocol, get_args

from housekeeping.core.cron import Cron
from housekeeping.core.telemetry import metrics
from housekeeping.core.telemetry.io_timing import WaitTimes
from housekeeping.database.clock_skew import TOLERATED
from housekeeping.sweeps.declaration import Sweep
from housekeeping.sweeps.engine.counts import CLOCK_SKEW
from housekeeping.sweeps.engine.results import RunResult
from housekeeping.sweeps.ledger.runs import STOPPED, Outcome
from housekeeping.sweeps.stages.stage import Backlog

OUTCOMES: tuple[str, ...] = tuple(outcome for outcome in get_args(Outcome) if outcome not in ("lost", "missed"))


def awaits(sweep: Sweep, cron: Cron | None) -> None:
    """Make a worker's metrics known before its first run, so that even the first error is an increase.

    Parameters:
      cron: Its schedule; null: it has none.
    """
    metrics.WAITING_SINCE.set(time.time(), sweep.name)
    for outcome in OUTCOMES:
        metrics.RUNS.add(sweep.name, outcome, number=0)
    for name in _counted(sweep):
        metrics.ROWS.add(sweep.name, name, number=0)
    for alarm in _of_a_runs_end(sweep):
        metrics.ALARM.set(0, sweep.name, alarm)
    for alarm, limit in _limits(sweep, cron):
        metrics.ALARM_LIMIT.set(limit, sweep.name, alarm)


def clock_skew(sweep: Sweep, ahead_s: float) -> None:
    """Set the metric of how far this machine's clock is ahead of the database's."""
    metrics.CLOCK_SKEW.set(ahead_s, sweep.name)


def ended(sweep: Sweep, result: RunResult, waited: WaitTimes) -> None:
    """Count a run, whatever became of it."""
    now = time.time()
    metrics.RUNS.add(sweep.name, result.outcome)
    metrics.LAST_ATTEMPT.set(now, sweep.name)
    if result.outcome == "skipped":
        return
    metrics.DURATION.observe(result.duration_s, sweep.name)
    metrics.DATABASE_TIME.add(sweep.name, number=waited.database_s)
    metrics.REDIS_TIME.add(sweep.name, number=waited.redis_s)
    for name in dict.fromkeys((*_counted(sweep), *result.counts)):
        number = result.counts.get(name, 0)  # what this run did not count, one before it may have
        if name != CLOCK_SKEW and _is_number(number):
            metrics.ROWS.add(sweep.name, name, number=number)
            metrics.LAST_RUN_ROWS.set(number, sweep.name, name)
    metrics.LAST_RUN_DURATION.set(result.duration_s, sweep.name)
    metrics.LAST_RUN.set(now, sweep.name)
    if result.outcome == "done" or (result.outcome == "partial" and result.reason not in STOPPED):
        metrics.LAST_SUCCESS.set(now, sweep.name)


def left(sweep: Sweep, waiting: Backlog, oldest: Any, now: datetime) -> None:
    """What waited after a run.

    Parameters:
      oldest: What the oldest stale record is known by; shown where it is a time.
    """
    # Where the count was broken off there is one more at the least.
    metrics.BACKLOG.set(waiting.rows + (not waiting.exact), sweep.name)
    if not waiting.rows:
        metrics.OLDEST.set(0, sweep.name)
    elif isinstance(oldest, datetime):
        since = oldest if oldest.tzinfo else oldest.replace(tzinfo=UTC)
        metrics.OLDEST.set((now - since).total_seconds(), sweep.name)


class Named(Protocol):
    """An alarm, as far as it matters here."""

    @property
    def name(self) -> str:
        """Which alarm."""


def record_alerts(sweep: Sweep, alarms: Iterable[Named], others: Literal["silent", "as they were"] = "silent") -> None:
    """Which alarms a run's end has set off, and how it is with the worker's others now."""
    loud = {alarm.name for alarm in alarms}
    for alarm in {*(_of_a_runs_end(sweep) if others == "silent" else ()), *loud}:
        metrics.ALARM.set(alarm in loud, sweep.name, alarm)


def _counted(sweep: Sweep) -> Iterator[str]:
    """The counts that are numbers; the engine counts those that failed for every worker."""
    yield from dict.fromkeys(
        (*(name for name in sweep.counts if name not in ("out_of_time", "execution_timeout")), "failed")
    )


def _of_a_runs_end(sweep: Sweep) -> Iterator[str]:
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
    alarms = sweep.alerts
    yield "failed_rows", 0
    yield "clock", TOLERATED.total_seconds()
    yield from ((f"most_{name}", most) for name, most in alarms.most.items())
    if alarms.longest_run is not None:
        yield "longest_run", alarms.longest_run.total_seconds()
    if alarms.backlog is not None and sweep.argument_name is None:
        yield "backlog", alarms.backlog
    if alarms.failed_runs is not None:
        yield "failed_runs", alarms.failed_runs
    if alarms.overdue is not None and cron is not None:
        yield "overdue", alarms.overdue * cron.period(datetime.now(UTC)).total_seconds()


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
