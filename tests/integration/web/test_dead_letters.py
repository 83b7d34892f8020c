"""Dead letters on the dashboard: list, details and requeue."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import quote

import dramatiq
import pytest
from dramatiq import Message
from dramatiq.brokers.redis import RedisBroker
from flask import Flask
from flask.testing import FlaskClient

from housekeeping import Settings
from tests.integration.middleware.step_worker import StepWorker, installed
from tests.integration.web.conftest import LogIn, form_token

QUEUE = "cronjob"  # of the built-in workers, which the first page counts
HOSTILE = "<script>alert('x')</script>\u202e"


@pytest.fixture
def broker_url() -> None:
    """Return a Redis broker's URL, with any ``--broker``."""


@pytest.fixture
def broker(settings: Settings, make_app: Callable[[bool], Flask]) -> Iterator[RedisBroker]:
    with installed(settings) as broker:
        yield broker


@pytest.fixture
def dead(broker: RedisBroker) -> Message[Any]:
    """Return a dead message with secrets and markup in every part that its sender chooses."""

    @dramatiq.actor(broker=broker, max_retries=0, queue_name=QUEUE)
    def charge(*args: Any, **kwargs: Any) -> None:
        raise ConnectionError(f"no answer from amqp://me:hunter2@host/ {HOSTILE}")

    message = charge.send_with_options(args=(HOSTILE,), kwargs={"password": "hunter2"}, note=HOSTILE)
    StepWorker(broker, QUEUE).run()
    return message


def one(message_id: str) -> str:
    return f"/dead-letters/one?id={quote(message_id, safe='')}"


def test_dead_letter_is_counted_listed_and_shown_in_full(client: FlaskClient, dead: Message[Any]) -> None:
    front, listed, shown = (
        client.get(path).get_data(as_text=True) for path in ("/", "/dead-letters", one(dead.message_id))
    )

    assert '<a class="alert" href="/dead-letters">1</a>' in front
    assert dead.message_id in listed and ">charge</td>" in listed and "ConnectionError: no answer" in listed
    assert "Traceback (most recent call last)" in shown and "args" in shown and "kwargs" in shown


def test_message_content_is_escaped_and_secrets_are_masked(client: FlaskClient, dead: Message[Any]) -> None:
    pages = [client.get(path).get_data(as_text=True) for path in ("/dead-letters", one(dead.message_id))]

    assert not any(bad in page for page in pages for bad in ("<script>alert", "hunter2", "\u202e"))
    assert all("&lt;script&gt;alert(&#39;x&#39;)&lt;/script&gt;\\u202e" in page for page in pages)


def test_dead_letter_is_requeued(client: FlaskClient, log_in: LogIn, dead: Message[Any], broker: RedisBroker) -> None:
    read_only = client.get(one(dead.message_id)).get_data(as_text=True)
    log_in(client)

    asked = client.get(one(dead.message_id))
    done = client.post(f"/dead-letters/requeue?id={quote(dead.message_id)}", data={"form_token": form_token(asked)})

    assert ">Requeue</button>" not in read_only and ">Requeue</button>" in asked.get_data(as_text=True)
    assert (done.status_code, done.location) == (303, "/dead-letters")
    after = client.get("/dead-letters").get_data(as_text=True)
    assert f"{dead.message_id}: requeued" in after and "no dead letters" in after
    assert StepWorker(broker, QUEUE).run().message_id == dead.message_id


def test_unreadable_message_is_shown_and_cannot_be_requeued(
    client: FlaskClient, log_in: LogIn, broker: RedisBroker
) -> None:
    key = f"{broker.namespace}:{QUEUE}.XQ"
    broker.client.zadd(key, {HOSTILE: 1})
    broker.client.hset(f"{key}.msgs", HOSTILE, f"\x00{HOSTILE}".encode())
    log_in(client)

    page = client.get(one(HOSTILE))
    refused = client.post(
        f"/dead-letters/requeue?id={quote(HOSTILE)}", data={"form_token": form_token(client.get("/dead-letters"))}
    )

    text = page.get_data(as_text=True)
    assert page.status_code == 200 and "<script>alert" not in text and ">Requeue</button>" not in text
    assert refused.status_code == 400 and "it cannot be read" in refused.get_data(as_text=True)


def test_unknown_dead_letter_is_an_error_page(client: FlaskClient, broker: RedisBroker) -> None:
    answer = client.get(one(HOSTILE))

    assert answer.status_code == 400 and "there is no dead letter" in answer.get_data(as_text=True)
    assert "<script>alert" not in answer.get_data(as_text=True)
