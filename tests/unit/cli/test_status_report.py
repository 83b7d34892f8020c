"""Alerts that count for ``status --fail-on-alert``."""

from __future__ import annotations

import dataclasses
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from tests.internals.database import ClockSkew
from tests.internals.insight import Alert, WorkerStatus
from tests.internals.ledger import Acknowledged
from tests.internals.web import Snapshot, Unavailable

NOW = datetime(2026, 1, 1, tzinfo=UTC)
WELL = WorkerStatus("shop.carts", "on", None, None, None, None)
BAD = dataclasses.replace(WELL, alarms=[Alert("backlog", "more than 10,000 rows wait")])


def snapshot(status: WorkerStatus = WELL, *, ahead_s: int = 0, **given: Any) -> Snapshot:
    clocks = {"main": ClockSkew(NOW, timedelta(seconds=ahead_s))}
    return Snapshot(NOW, statuses={status.worker: status}, clocks=clocks, **given)


@pytest.mark.parametrize(
    ("found", "fails"),
    [
        (snapshot(), False),
        (snapshot(BAD), True),
        (snapshot(alerts=[Alert("scheduler", "no scheduler is alive")]), True),
        (snapshot(ahead_s=6), True),
        (snapshot(unavailable={"PostgreSQL": Unavailable("PostgreSQL", "main", "away", NOW)}), True),
        (snapshot(unavailable={"Redis": Unavailable("Redis", None, "away", NOW)}), True),
    ],
)
def test_alerts_and_servers_that_do_not_answer_count(found: Snapshot, fails: bool) -> None:
    assert found.has_alerts is fails


@pytest.mark.parametrize(("since", "fails"), [(NOW - timedelta(hours=1), False), (NOW + timedelta(hours=1), True)])
def test_alert_that_begins_after_its_acknowledgment_counts(since: datetime, fails: bool) -> None:
    alert = Alert("backlog", "more than 10,000 rows wait", since=since)
    known = {("shop.carts", "backlog"): Acknowledged("kim", NOW)}

    found = snapshot(dataclasses.replace(WELL, alarms=[alert]), acknowledgments=known)

    assert found.has_alerts is fails
