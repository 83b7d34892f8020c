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
BAD = Alert("backlog", "more than 10,000 rows wait", worker=WELL.worker)
KNOWN = Acknowledged("kim", NOW)
AWAY = Unavailable("Redis", None, "away", NOW)


def snapshot(*alerts: Alert, ahead_s: int = 0, **given: Any) -> Snapshot:
    clocks = {"main": ClockSkew(NOW, timedelta(seconds=ahead_s))}
    return Snapshot(NOW, statuses={WELL.worker: WELL}, clocks=clocks, alerts=alerts, **given)


@pytest.mark.parametrize(
    ("found", "fails"),
    [
        (snapshot(), False),
        (snapshot(BAD), True),
        (snapshot(dataclasses.replace(BAD, acknowledged=KNOWN)), False),
        (snapshot(Alert("no_scheduler", "no scheduler is alive")), True),
        (snapshot(ahead_s=6), True),
        (snapshot(unavailable={"PostgreSQL": Unavailable("PostgreSQL", "main", "away", NOW)}), True),
        (snapshot(unavailable={"Redis": AWAY}), True),
        (snapshot(Alert("unavailable", "", subject="Redis", acknowledged=KNOWN), unavailable={"Redis": AWAY}), False),
    ],
)
def test_alerts_and_servers_that_do_not_answer_count(found: Snapshot, fails: bool) -> None:
    assert found.has_alerts is fails
