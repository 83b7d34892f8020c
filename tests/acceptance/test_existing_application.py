"""Middleware alone, on an existing application (docs/howto/existing-application.md)."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path

import pytest
import redis

import housekeeping
from housekeeping.core.settings import Settings
from housekeeping.leases.store import RedisLeaseStore
from tests.acceptance.examples import EXAMPLES, Application, without_settings
from tests.acceptance.examples import client as client
from tests.acceptance.examples import redis_url as redis_url
from tests.acceptance.processes import SCHEDULER, eventually, started

pytestmark = pytest.mark.slow

#: Actions of an invoicing application's users on its web page.
ASKED = """
from invoices.web import application

page = application.test_client()
waiting = [page.post("/invoices/7/render", headers={"Tenant": "anna"}).json["waiting"] for _ in range(5)]
assert waiting == [True, False, False, False, False], waiting
for cents in (100, 200):
    page.post("/invoices/7/charge", headers={"Tenant": "anna"}, data={"cents": cents})
"""
CLOSING = 'from invoices.web import application; application.test_client().post("/books/close")'


@pytest.fixture(params=["without a database", "with one"])
def invoices(request: pytest.FixtureRequest, client: redis.Redis, redis_url: str) -> Application:
    environment = without_settings(os.environ, INVOICES_REDIS_URL=redis_url)
    if request.param == "with one":
        request.getfixturevalue("postgres")
        settings: Settings = request.getfixturevalue("settings")
        own_settings = {"HOUSEKEEPING_DATABASE_URL": settings.database_url, "HOUSEKEEPING_SCHEMA": settings.schema_name}
        environment = without_settings(environment, **own_settings)
    return Application("invoices.actors", "invoices", environment, client)


def test_library_middleware_works_beside_an_applications_own(
    invoices: Application, client: redis.Redis, tmp_path: Path
) -> None:
    invoices.run(ASKED, tmp_path / "web.log")
    books = housekeeping.ExclusiveLease("books", timedelta(minutes=1), client=RedisLeaseStore(client, "housekeeping"))

    with invoices.at_work(tmp_path / "worker.log") as worker:
        with books:
            invoices.run(CLOSING, tmp_path / "closing.log")
            invoices.wait_until_done(worker)
        before = client.lrange("invoices:done", 0, -1)
        invoices.run(CLOSING, tmp_path / "closing_again.log")
        eventually(lambda: client.llen("invoices:done") == 3, worker)

    charged_once = (["anna: charged 100 for 7"], ["anna: charged 200 for 7"])
    assert [line for line in before if "charged" in line] in charged_once
    assert [line for line in before if "charged" not in line] == ["anna: rendered 7"]
    assert client.lindex("invoices:done", -1) == "nobody: closed the month"


def test_periodiq_sends_by_the_schedule_of_its_actors(invoices: Application, tmp_path: Path) -> None:
    command = [*SCHEDULER, "--verbose", "invoices.actors", "--path", str(EXAMPLES)]

    with started(command, invoices.environment, tmp_path / "scheduler.log") as scheduler:
        eventually(lambda: "close_month" in scheduler.text(), scheduler)
