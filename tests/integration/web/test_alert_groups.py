"""Alerts grouped by cause, and their acknowledgment."""

from __future__ import annotations

import re
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

from flask.testing import FlaskClient

from tests.integration.web.conftest import WORKER, LogIn, form_token
from tests.internals.insight import Alert
from tests.internals.ledger import Acknowledged, AlertRow, Run, logged_actions
from tests.internals.web import are_open, explained, group_alerts

NOW = datetime.now(UTC)
HOUR = timedelta(hours=1)
ALERT = Alert("last_run", "failed", since=NOW - HOUR)


def failed(**given: Any) -> None:
    times = dict.fromkeys(("started_at", "heartbeat_at", "finished_at"), NOW - HOUR)
    Run.create(**{"worker": WORKER, "trigger": "schedule", "outcome": "failed", "reason": "gone", **times, **given})


def test_storm_takes_one_group_for_each_cause() -> None:
    names = ("unseen", "overdue", "last_run")
    storm = [Alert(name, "x", worker=f"w{number}") for number in range(60) for name in names]

    groups = group_alerts(storm)

    assert [(group.name, group.subject) for group in groups] == [(name, "60 workers") for name in names]
    assert not are_open(groups) and are_open(group_alerts(storm[:3]))


def test_group_is_as_old_as_its_first_alert() -> None:
    [group] = group_alerts([ALERT, Alert("last_run", "x", since=NOW), Alert("last_run", "x")])

    assert group.since == NOW - HOUR


def test_acknowledged_alerts_come_last() -> None:
    known = replace(ALERT, worker="a", acknowledged=Acknowledged("kim", NOW))

    groups = group_alerts(explained([known, Alert("unseen", "x", worker="a"), replace(ALERT, worker="b")], {}, str))

    assert [(group.name, group.subject, group.acknowledged is None) for group in groups] == [
        ("last_run", "b", True),
        ("unseen", "a", True),
        ("last_run", "a", False),
    ]


def test_acknowledged_group_names_its_user_and_is_logged(client: FlaskClient, log_in: LogIn) -> None:
    failed()
    log_in(client)
    page = client.get("/").get_data(as_text=True)
    [seen] = re.findall(r'value="last_run"><input type="hidden" name="seen" value="([^"]+)"', page)
    word = form_token(client.get("/"))

    done = client.post("/alerts/acknowledge", data={"form_token": word, "name": "last_run", "seen": seen})
    after = client.get("/").get_data(as_text=True)

    assert done.status_code == 303 and "acknowledged by dashboard" in after
    before, left = (int(re.findall(r"<title>\((\d+)\)", each)[0]) for each in (page, after))
    assert left == before - 1
    logged, _ = logged_actions(9)
    assert (logged.action, logged.target, logged.result) == (
        "acknowledge",
        "last_run",
        f"last_run acknowledged for {WORKER}",
    )


def test_alert_that_the_page_did_not_show_is_not_acknowledged(client: FlaskClient, log_in: LogIn) -> None:
    failed()
    log_in(client)
    word = form_token(client.get("/"))

    refused = client.post("/alerts/acknowledge", data={"form_token": word, "name": "last_run", "seen": "999999999"})

    assert refused.status_code == 404 and AlertRow.select().where(AlertRow.acknowledged_at.is_null(False)).count() == 0


def test_alert_of_runs_is_active_since_the_first_run_of_the_series(client: FlaskClient) -> None:
    ages = ((5, "done"), (4, "failed"), (3, "lost"), (2, "failed"))
    for hours, outcome in ages:
        times = dict.fromkeys(("started_at", "heartbeat_at", "finished_at"), NOW - hours * HOUR)
        failed(outcome=outcome, **times)

    page = client.get("/").get_data(as_text=True)

    assert f"since {NOW - 4 * HOUR:%Y-%m-%d %H:%M:%S} UTC" in page
