"""Page of the processes, with their current runs."""

from __future__ import annotations

import re
from datetime import timedelta
from typing import Any

import pytest
from flask.testing import FlaskClient

from tests.integration.conftest import Beat
from tests.integration.web.conftest import WORKER
from tests.internals.ledger import NOW as DATABASE_NOW
from tests.internals.ledger import Heartbeat, Run

pytestmark = pytest.mark.one_database_only(reason="the test names runs of the only database")

HOUR = timedelta(hours=1)
WORKERS = Heartbeat(
    kind="worker", host="<b>host", pid=7, queues=["cronjob"], threads=8, busy=3, version="1.2", up_s=600.0
)


def open_run(**given: Any) -> int:
    began = {"started_at": DATABASE_NOW - timedelta(seconds=30), "heartbeat_at": DATABASE_NOW}
    run_id: int = Run.insert(**{"worker": WORKER, "trigger": "schedule", **began, **given}).execute()
    return run_id


def rows(page: str) -> list[str]:
    return re.findall(r"<tr>(.*?)</tr>", page, flags=re.DOTALL)[1:]


def test_process_is_shown_with_its_runs(client: FlaskClient, beat: Beat) -> None:
    beat("one", WORKERS)
    beat("two", Heartbeat(kind="scheduler", host="app", pid=9, version="1.2", up_s=5.0))
    run_id = open_run(host="<b>host", pid=7)
    Run.update(outcome="done", finished_at=DATABASE_NOW).where(Run.id == open_run(host="app", pid=9)).execute()

    page = client.get("/processes").get_data(as_text=True)

    scheduler, worker = rows(page)
    assert "&lt;b&gt;host" in worker and ">7<" in worker and "3 of 8" in worker and "cronjob" in worker
    assert f"run {run_id}, " in worker and f'href="/runs/{run_id}"' in worker and ">1.2<" in worker
    assert ">scheduler<" in scheduler and "/runs/" not in scheduler
    assert "1 worker alive, 3 of 8 threads busy; 1 scheduler alive; 0 processes dead" in page


def test_run_belongs_to_the_last_process_with_its_id_that_began_before_it(client: FlaskClient, beat: Beat) -> None:
    beat("dead", WORKERS.model_copy(update={"up_s": 3600.0}), HOUR)
    beat("alive", WORKERS)
    old = open_run(host="<b>host", pid=7, started_at=DATABASE_NOW - HOUR, heartbeat_at=DATABASE_NOW - HOUR)
    new = open_run(host="<b>host", pid=7)

    alive, dead = rows(client.get("/processes").get_data(as_text=True))

    assert f"/runs/{new}" in alive and f"/runs/{old}" not in alive
    assert f"/runs/{old}" in dead and "lost? no heartbeat for 1 h" in dead and "dead? no heartbeat for 1 h" in dead


def test_run_of_no_known_process_is_listed_apart(client: FlaskClient) -> None:
    by_hand, elsewhere = open_run(host="desk", pid=1, trigger="cli"), open_run()

    page = client.get("/processes").get_data(as_text=True)

    assert "Runs of other processes" in page and "desk:1" in page and "not recorded" in page
    assert all(f'href="/runs/{each}"' in page for each in (by_hand, elsewhere))


def test_page_takes_few_statements_whatever_the_number_of_processes(
    client: FlaskClient, statements: list[str], beat: Beat
) -> None:
    for number in range(50):
        beat(f"p{number}", WORKERS.model_copy(update={"pid": 100 + number}))
        open_run(host="<b>host", pid=100 + number)
    del statements[:]

    client.get("/processes")

    assert len([sql for sql in statements if "SELECT" in sql]) <= 4


def test_page_says_that_redis_and_the_database_are_empty(client: FlaskClient) -> None:
    assert "no heartbeat within a day" in client.get("/processes").get_data(as_text=True)
