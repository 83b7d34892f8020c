"""Plan, confirmation, and the run that the dashboard sends."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from flask import Flask
from flask.testing import FlaskClient
from psycopg2.extensions import connection as Connection

from housekeeping import Settings
from tests.integration.conftest import AddStatuses, Locked
from tests.integration.middleware.applications import queued
from tests.integration.middleware.step_worker import StepWorker, close
from tests.integration.web.conftest import TOKEN, WORKER, LogIn, form_token
from tests.internals.app import broker_without_database
from tests.internals.embedded import embedded
from tests.internals.ledger import Override, Run, logged_actions, switch
from tests.internals.web import create_app
from tests.internals.workers import configured_sweeps

PATH = f"/workers/{WORKER}"


@pytest.fixture
def broker_url() -> None:
    """Return a Redis broker's URL, with any ``--broker``."""


@pytest.fixture
def broker(settings: Settings, make_app: Callable[[bool], Flask]) -> Iterator[Any]:
    """Return a broker that declares the worker's actor, as a worker process does."""
    broker = broker_without_database(settings, {WORKER: configured_sweeps(settings)[WORKER]})
    yield broker
    close(broker)


@pytest.fixture
def queue(settings: Settings) -> str:
    return configured_sweeps(settings)[WORKER].queue


def send(client: FlaskClient, rows: int, **more: str) -> Any:
    asked = client.get(f"{PATH}/run?rows={rows}&exact=1")
    form = {"form_token": form_token(asked), "rows": str(rows), "exact": "1", **more}
    return client.post(f"{PATH}/run", data=form)


def test_plan_page_shows_rows_oldest_row_batches_and_time(client: FlaskClient, add_statuses: AddStatuses) -> None:
    add_statuses(250, "now() - interval '2 hours'")

    page = client.get(f"{PATH}/plan").get_data(as_text=True)

    summary = re.sub("</?time[^>]*>", "", page.split('id="summary"')[1].split("</dl>")[0])
    assert re.findall(r'class="number">([^<]*)</dd>', summary) == [
        "250",
        "2 h ago",
        "3",
        "unknown: no run has ended yet",
    ]
    assert '#no_worker">queue</a>' in page and "a run now would wait (no_worker)" in page.casefold()
    assert 'name="rows" value="250"' in page and ">Run now…</button>" in page


def test_plan_page_of_a_locked_table_has_no_numbers(client: FlaskClient, locked: Locked) -> None:
    with locked("LOCK TABLE user_statuses"):
        page = client.get(f"{PATH}/plan").get_data(as_text=True)

    summary = page.split('id="summary"')[1].split("</dl>")[0]
    assert re.findall(r'class="number">([^<]*)</dd>', summary) == [
        "unknown",
        "-",
        "unknown",
        "unknown: no run has ended yet",
    ]


def test_run_is_confirmed_sent_and_linked_once_it_began(
    client: FlaskClient, log_in: LogIn, broker: Any, queue: str, add_statuses: AddStatuses
) -> None:
    add_statuses(3, "now() - interval '1 hour'")
    log_in(client)

    sent = send(client, 3)
    waiting = client.get(sent.location).get_data(as_text=True)
    message = StepWorker(broker, queue).run()
    begun = client.get(sent.location).get_data(as_text=True)

    [run], [action, _] = Run.select(), logged_actions(10)
    assert (action.user, action.action, action.target) == ("dashboard@127.0.0.1", "run", WORKER)
    assert action.result == f"enqueued: message {message.message_id} in queue {queue}"
    assert sent.status_code == 303 and message.message_id in waiting
    assert f"{WORKER} enqueued: message {message.message_id} in queue {queue}." in waiting
    assert "No run of this message has begun." in waiting
    assert (run.message_id, run.trigger, run.counts["deleted_rows"]) == (message.message_id, "enqueue", 3)
    assert f'href="/runs/{run.id}"' in begun


def test_second_run_is_dropped_as_a_duplicate_of_the_first(
    client: FlaskClient, log_in: LogIn, broker: Any, queue: str
) -> None:
    log_in(client)

    first, second = send(client, 0), send(client, 0)

    assert second.location == first.location and len(queued(broker, queue)) == 1
    assert "dropped as a duplicate: message" in client.get(second.location).get_data(as_text=True)


def test_paused_worker_is_named_before_and_after_it_is_sent(client: FlaskClient, log_in: LogIn, broker: Any) -> None:
    switch(Override(WORKER, "paused", "migration"))
    log_in(client)

    pages = [client.get(f"{PATH}/plan"), client.get(f"{PATH}/run?rows=0&exact=1"), client.get(send(client, 0).location)]

    texts = [page.get_data(as_text=True) for page in pages]
    assert all(f"{WORKER} is paused until it is resumed: migration" in text for text in texts)
    assert "would process" not in texts[0]
    assert '<td data-label="Effect">skips</td>' in texts[0] and all("will be skipped" in text for text in texts[1:])


def test_run_is_not_offered_while_redis_is_stopped(
    settings: Settings, make_app: Callable[[bool], Flask], add_statuses: AddStatuses, log_in: LogIn
) -> None:
    add_statuses(3, "now() - interval '1 hour'")
    with embedded.start(postgres=False) as servers:
        url = servers.redis_url
    stopped = settings.model_copy(update={"redis_url": url, "broker_url": None})
    only = {WORKER: configured_sweeps(settings)[WORKER]}
    client = create_app(stopped, only, TOKEN, open_to_read=True).test_client()
    log_in(client)

    planned = client.get(f"{PATH}/plan").get_data(as_text=True)
    confirming = client.get(f"{PATH}/run?rows=3&exact=1").get_data(as_text=True)

    assert "would start" not in planned and "Run now…" not in planned and ">Run now</button>" not in confirming
    assert all("Run now is not offered: Redis did not answer: " in page for page in (planned, confirming))


@pytest.mark.parametrize(("rows", "outgrown"), [(1001, True), (1002, False)])
def test_plan_that_has_grown_much_is_shown_again_instead_of_run(
    client: FlaskClient, log_in: LogIn, broker: Any, queue: str, add_statuses: AddStatuses, rows: int, outgrown: bool
) -> None:
    add_statuses(2003, "now() - interval '1 hour'")
    log_in(client)

    answer = send(client, rows)

    page = answer.get_data(as_text=True)
    assert (answer.status_code, len(queued(broker, queue))) == ((409, 0) if outgrown else (303, 1))
    assert outgrown == ("Nothing was enqueued: you confirmed a plan of 1,001 rows" in page)
    assert outgrown == ('name="rows" value="2003"' in page)


def test_rows_that_cannot_be_counted_again_are_not_run(
    client: FlaskClient, log_in: LogIn, broker: Any, queue: str, admin: Connection, settings: Settings
) -> None:
    log_in(client)
    asked = client.get(f"{PATH}/run?rows=3&exact=1")
    with admin.cursor() as cursor:
        cursor.execute(f"ALTER TABLE {settings.namespace}.user_statuses RENAME COLUMN clear_status_at TO elsewhere")

    answer = client.post(f"{PATH}/run", data={"form_token": form_token(asked), "rows": "3", "exact": "1"})

    assert (answer.status_code, queued(broker, queue)) == (400, [])
    assert "has no column clear_status_at" in answer.get_data(as_text=True)


@pytest.mark.parametrize("rows", ["", "-1", "x", "１", "9" * 20])
def test_confirmation_without_a_number_of_rows_is_rejected(client: FlaskClient, rows: str) -> None:
    assert client.get(f"{PATH}/run", query_string={"rows": rows}).status_code == 400


def test_reader_gets_no_button_that_runs(client: FlaskClient, broker: Any, queue: str) -> None:
    page = client.get(f"{PATH}/run?rows=3&exact=1").get_data(as_text=True)
    refused = client.post(f"{PATH}/run", data={"rows": "3", "exact": "1"})

    assert ">Run now</button>" not in page and ">Log in</a> to run it." in page
    assert refused.status_code == 302 and queued(broker, queue) == []


def test_message_id_from_the_url_is_escaped(client: FlaskClient) -> None:
    page = client.get(f"{PATH}/message", query_string={"id": "<script>alert(1)</script>\0"}).get_data(as_text=True)

    assert "&lt;script&gt;" in page and "<script>alert" not in page
