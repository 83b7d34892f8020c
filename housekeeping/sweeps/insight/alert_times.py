"""Times since which alerts are active, from the ledger."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from datetime import datetime, timedelta

from housekeeping.sweeps.declaration import Sweep
from housekeeping.sweeps.insight.alerts import (
    Alert,
    backlog_alerts,
    breaker_alerts,
    is_failed,
    last_run_alerts,
    run_alerts,
)
from housekeeping.sweeps.insight.backlog import MOST_RUNS, Ended
from housekeeping.sweeps.stages.stage import Backlog


def with_times(sweep: Sweep, alerts: Iterable[Alert], ended: Sequence[Ended], now: datetime) -> list[Alert]:
    """Return the alerts with the times since which they are active, where the ledger tells.

    An alert of runs is active since the start of the first of the unbroken series of runs that raised it.

    Parameters:
      ended: The worker's last runs, oldest first.
    """
    names = [_names(sweep, run) for run in ended]
    return [alert if alert.since else replace(alert, since=_since(alert, ended, names, now)) for alert in alerts]


def _since(alert: Alert, ended: Sequence[Ended], names: Sequence[set[str]], now: datetime) -> datetime | None:
    if alert.name == "overdue" and alert.value is not None and alert.limit is not None:
        return now - timedelta(seconds=alert.value - alert.limit)
    first = len(ended)
    while first and alert.name in names[first - 1]:
        first -= 1
    if first == len(ended) or (first == 0 and len(ended) >= MOST_RUNS):
        return None  # no ended run raised it, or earlier runs may have raised it, too
    return ended[first].started_at


def _names(sweep: Sweep, run: Ended) -> set[str]:
    """Return the names of the alerts that a run raises or contributes to, such as ``failed_runs``."""
    duration_s = (run.finished_at - run.started_at).total_seconds()
    found = {alert.name for alert in run_alerts(sweep, duration_s, run.counts)}
    found |= {alert.name for alert in last_run_alerts(run.outcome, run.reason)}
    found |= {alert.name for alert in breaker_alerts(sweep, run.counts)}
    if run.backlog is not None:
        waiting = Backlog(run.backlog, exact=bool(run.backlog_exact))
        found |= {alert.name for alert in backlog_alerts(sweep, waiting)}
    if is_failed(run.outcome):
        found.add("failed_runs")
    if run.reason == "gate":
        found.add("throttled")
    return found
