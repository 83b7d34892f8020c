"""Every change on the dashboard is in the action log."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Final

from flask.testing import FlaskClient

from housekeeping import ExclusiveLease
from tests.integration.web.conftest import TOKEN, WORKER
from tests.integration.web.test_alert_groups import failed
from tests.integration.web.test_security import addresses_that_change
from tests.internals.ledger import logged_actions, record_action

#: They change the login alone.
NOT_LOGGED: Final = ("/login", "/logout")
#: Action and target by address.
LOGGED: Final = {
    "/alerts/acknowledge": ("acknowledge", "last_run"),
    "/all/pause": ("pause", WORKER),
    "/all/resume": ("resume", WORKER),
    "/dead-letters/all/delete": ("delete", "0 dead letters: all"),
    "/dead-letters/requeue": ("requeue", "m"),
    "/leases/release": ("release_lease", "k"),
    "/runs/1/stop": ("stop", "1"),
    f"/workers/{WORKER}/narrow": ("narrow", WORKER),
    f"/workers/{WORKER}/pause": ("pause", WORKER),
    f"/workers/{WORKER}/resume": ("resume", WORKER),
    f"/workers/{WORKER}/run": ("run", WORKER),
}


def test_every_change_on_the_dashboard_is_logged(client: FlaskClient) -> None:  # O1
    failed()
    assert ExclusiveLease("k", timedelta(minutes=1)).try_obtain() is not None
    form = {"name": "last_run", "batch_size": "1", "all": "1", "shown": "1", "shown_at": datetime.now(UTC).isoformat()}
    addresses = [each for each in addresses_that_change() if each not in NOT_LOGGED]

    for address in addresses:
        names = {"key": "k", "id": "m"}
        sent = form | ({"name": WORKER} if address == "/all/resume" else {})
        client.post(address, query_string=names, data=sent, headers={"Authorization": f"Bearer {TOKEN}"})

    logged = [(each.action, each.target) for each in reversed(logged_actions(100))]
    assert dict(zip(addresses, logged, strict=True)) == LOGGED


def test_worker_page_lists_a_run_with_an_argument(client: FlaskClient) -> None:
    for target in (WORKER, f"{WORKER} 17", f"{WORKER}.archive"):
        with record_action("run", target, "kim") as outcome:
            outcome.result = f"result of {target}"

    page = client.get(f"/workers/{WORKER}").get_data(as_text=True)

    assert f"result of {WORKER} 17" in page and f"result of {WORKER}<" in page
    assert f"result of {WORKER}.archive" not in page
