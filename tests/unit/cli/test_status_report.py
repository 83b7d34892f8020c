"""Alerts that count for ``status --fail-on-alert``."""

from __future__ import annotations

import dataclasses
from datetime import UTC, datetime, timedelta

import pytest

from housekeeping.cli.status_report import DatabaseReport, StatusReport
from housekeeping.core.errors import DatabaseUnavailable
from housekeeping.database.clock_skew import ClockSkew
from housekeeping.sweeps.insight.alerts import Alert
from housekeeping.sweeps.insight.status import WorkerStatus
from housekeeping.sweeps.ledger.acknowledgments import Acknowledged
from housekeeping.sweeps.processes.heartbeats import UNKNOWN

NOW = datetime(2026, 1, 1, tzinfo=UTC)
WELL = WorkerStatus("shop.carts", "on", None, None, None, None)
BAD = dataclasses.replace(WELL, alarms=[Alert("backlog", "more than 10,000 rows wait")])


def database(ahead_s: int = 0, error: DatabaseUnavailable | None = None) -> DatabaseReport:
    return DatabaseReport("main", [], clock=ClockSkew(NOW, timedelta(seconds=ahead_s)), error=error)


@pytest.mark.parametrize(
    ("found", "statuses", "alerts", "fails"),
    [
        (database(), [WELL], [], False),
        (database(), [WELL, BAD], [], True),
        (database(), [WELL], [Alert("scheduler", "no scheduler is alive")], True),
        (database(ahead_s=6), [WELL], [], True),
        (database(error=DatabaseUnavailable("away")), [WELL], [], True),
    ],
)
def test_alerts_of_workers_processes_and_databases_count(
    found: DatabaseReport, statuses: list[WorkerStatus], alerts: list[Alert], fails: bool
) -> None:
    report = StatusReport(NOW, [found], statuses, {}, [], None, UNKNOWN, alerts, has_several=False)

    assert report.has_alerts is fails


@pytest.mark.parametrize(("since", "fails"), [(NOW - timedelta(hours=1), False), (NOW + timedelta(hours=1), True)])
def test_alert_that_begins_after_its_acknowledgment_counts(since: datetime, fails: bool) -> None:
    alert = Alert("backlog", "more than 10,000 rows wait", since=since)
    status = dataclasses.replace(WELL, alarms=[alert])
    known = {("shop.carts", "backlog"): Acknowledged("kim", NOW)}

    report = StatusReport(NOW, [database()], [status], {}, [], None, UNKNOWN, [], False, known)

    assert report.has_alerts is fails
