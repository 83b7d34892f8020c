"""Middleware alone, on an existing application (docs/howto/existing-application.md)."""

from __future__ import annotations

import os
from collections import Counter
from datetime import timedelta
from pathlib import Path
from typing import Final

import pytest
import redis
from psycopg2.extensions import connection as Connection

import housekeeping
from housekeeping import Settings
from tests.acceptance.examples import EXAMPLES, Application, without_settings
from tests.acceptance.examples import client as client
from tests.acceptance.examples import redis_url as redis_url
from tests.acceptance.processes import SCHEDULER, eventually, started
from tests.internals.core import PREFIX
from tests.internals.database import Database
from tests.internals.leases import RedisLeaseStore

pytestmark = pytest.mark.slow

#: Folder whose ``sitecustomize`` lets the broker deliver messages of a dead worker again after a second.
QUICK: Final = Path(__file__).with_name("quick_redeliveries")

#: Actions of an invoicing application's users on its web page.
ASKED = """
from invoices.web import application

page = application.test_client()
waiting = [page.post("/invoices/7/render", headers={"Tenant": "anna"}).json["waiting"] for _ in range(5)]
assert waiting == [True, False, False, False, False], waiting
"""
#: Sends hundreds of charges, each of them twice.
CHARGED_BY_HUNDREDS = """
from invoices.actors import charge

for invoice in range(300):
    for _ in range(2):
        charge.send_with_options(args=(invoice, 100), idempotency_key=f"invoice-{invoice}")
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
        eventually(lambda: client.llen("invoices:done") == 2, worker)

    assert before == ["anna: rendered 7"]
    assert client.lindex("invoices:done", -1) == "nobody: closed the month"


@pytest.fixture
def charging(
    client: redis.Redis, redis_url: str, postgres: Database, settings: Settings, admin: Connection
) -> Application:
    """The application with a table of charges, and heartbeats that are missed after a second."""
    with admin.cursor() as cursor:
        cursor.execute("CREATE TABLE charges (invoice bigint NOT NULL, cents bigint NOT NULL)")
    own_settings = {"DATABASE_URL": settings.database_url, "SCHEMA": settings.schema_name}
    environment = without_settings(
        os.environ,
        INVOICES_REDIS_URL=redis_url,
        INVOICES_DATABASE_URL=settings.database_url,
        PYTHONPATH=str(QUICK),
        **{f"{PREFIX}{name}": value for name, value in own_settings.items()},
    )
    return Application("invoices.actors", "invoices", environment, client)


def charges(admin: Connection) -> Counter[int]:
    """Return how often each invoice was charged."""
    with admin.cursor() as cursor:
        cursor.execute("SELECT invoice FROM charges")
        return Counter(invoice for (invoice,) in cursor)


def test_workers_that_are_killed_all_the_time_charge_once(
    charging: Application, admin: Connection, tmp_path: Path
) -> None:
    charging.run(CHARGED_BY_HUNDREDS, tmp_path / "web.log")

    kills = 0
    while charging.unfinished():
        with charging.at_work(tmp_path / f"worker{kills}.log") as worker:
            before = len(charges(admin))
            eventually(
                lambda: len(charges(admin)) > before + 40 or not charging.unfinished(),  # noqa: B023
                worker,
            )
            worker.kill()
            kills += 1

    assert kills > 2
    assert charges(admin) == dict.fromkeys(range(300), 1)


def test_periodiq_sends_by_the_schedule_of_its_actors(invoices: Application, tmp_path: Path) -> None:
    command = [*SCHEDULER, "--verbose", "invoices.actors", "--path", str(EXAMPLES)]

    with started(command, invoices.environment, tmp_path / "scheduler.log") as scheduler:
        eventually(lambda: "close_month" in scheduler.text(), scheduler)
