"""Filter, pages, bulk requeue and bulk delete of dead letters on the dashboard."""

from __future__ import annotations

import re
from datetime import datetime, timedelta
from typing import Any
from urllib.parse import parse_qsl

import pytest
from dramatiq import Message
from dramatiq.brokers.redis import RedisBroker
from dramatiq.common import current_millis
from flask.testing import FlaskClient

from tests.acceptance.processes import eventually
from tests.integration.brokers.dead_letters.test_looking import bury
from tests.integration.middleware.applications import queued
from tests.integration.web.conftest import LogIn, form_token
from tests.integration.web.test_dead_letters import HOSTILE
from tests.integration.web.test_dead_letters import broker as broker
from tests.integration.web.test_dead_letters import broker_url as broker_url
from tests.internals.ledger import logged_actions
from tests.internals.web import dead_letter_changes, dead_letters


@pytest.fixture
def letters(broker: RedisBroker) -> RedisBroker:
    """Bury 120 letters, every fourth one of another actor, queue and error."""
    at = current_millis() - 3_600_000
    for number in range(120):
        queue, actor, error = ("mail", "send_mail", "disk full") if number % 4 == 0 else ("default", "charge", HOSTILE)
        message: Message[Any] = Message(queue, actor, (number,), {}, {"traceback": f"ValueError: {error}"})
        bury(broker, message.encode(), f"letter-{number}", queue, died_at=at + number)
    return broker


def confirmed(client: FlaskClient, path: str) -> tuple[str, str]:
    """Open a confirmation, send its form, and return both pages' texts."""
    asked = client.get(path)
    text = asked.get_data(as_text=True)
    fields: dict[str, Any] = {}
    for name, value in re.findall(r'<input type="hidden" name="(\w+)" value="([^"]*)"', text.split("<main")[1]):
        fields.setdefault(name, []).append(value)
    fields["form_token"] = form_token(asked)
    done = client.post(path.partition("?")[0], data=fields, follow_redirects=True)
    return text, done.get_data(as_text=True)


def dead(broker: RedisBroker, queue: str) -> int:
    number: Any = broker.client.zcard(f"{broker.namespace}:{queue}.XQ")
    return int(number)


def test_filter_keeps_what_was_typed_and_shows_what_matches(client: FlaskClient, letters: RedisBroker) -> None:
    page = client.get("/dead-letters?actor=send_mail&error=DISK&since=2h").get_data(as_text=True)

    assert page.count(">send_<wbr>mail</td>") == 30 and ">charge</td>" not in page
    assert 'name="error" value="DISK"' in page and "120 in total" in page and "Show all" in page


def test_search_that_takes_long_is_cut_short_and_says_so(
    client: FlaskClient, log_in: LogIn, letters: RedisBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dead_letters, "MAX_SEARCH", timedelta())
    monkeypatch.setattr(dead_letter_changes, "MAX_SEARCH", timedelta())
    log_in(client)

    page = client.get("/dead-letters?error=nowhere").get_data(as_text=True)
    asked = client.get("/dead-letters/all/delete?all=1&error=nowhere").get_data(as_text=True)

    cut_short = "the search ended after a second and 1 dead letter. Older ones may match, too"
    assert cut_short in page and '&amp;error=nowhere">Older</a>' in page and "no dead letter matches" in page
    assert "Delete all dead letters that match?" in asked and "At least 0 dead letters match" in asked


def test_pages_lead_from_the_newest_letter_to_the_oldest(client: FlaskClient, letters: RedisBroker) -> None:
    path, found = "/dead-letters?queue=default", list[str]()
    for _ in range(2):
        page = client.get(path).get_data(as_text=True)
        found += re.findall(r"<code>(\d+)</code>", page)
        older = re.search(r'href="([^"]+)">Older<', page)
        path = older[1].replace("&amp;", "&") if older else ""

    assert found == [str(number) for number in range(119, -1, -1) if number % 4]
    assert path == ""


def test_wrong_time_is_an_error_beside_its_field(client: FlaskClient, letters: RedisBroker) -> None:
    answer = client.get("/dead-letters?since=soon&actor=send_mail")

    page = answer.get_data(as_text=True)
    assert answer.status_code == 400 and 'value="soon"' in page
    assert 'aria-invalid="true" aria-describedby="wrong-since"' in page and "&#39;soon&#39; is not a time" in page
    assert client.get("/dead-letters/all/delete?all=1&since=soon").status_code == 400


def test_all_that_match_are_requeued_after_a_confirmation(
    client: FlaskClient, log_in: LogIn, letters: RedisBroker
) -> None:
    log_in(client)

    asked, done = confirmed(client, "/dead-letters/all/requeue?all=1&actor=send_mail")

    action, _ = logged_actions(10)
    assert (action.action, action.target, action.result) == (
        "requeue",
        "30 dead letters: actor 'send_mail'",
        "30 requeued",
    )
    assert "Requeue 30 dead letters?" in asked
    assert "Dead letters: 30 requeued." in done and "no dead letter matches" in done
    assert (dead(letters, "mail"), dead(letters, "default"), len(queued(letters, "mail"))) == (0, 90, 30)


def test_letters_that_die_after_the_confirmation_stay(client: FlaskClient, log_in: LogIn, letters: RedisBroker) -> None:
    log_in(client)
    asked = client.get("/dead-letters/all/delete?all=1")
    text = asked.get_data(as_text=True)
    shown_at = re.search(r'name="shown_at" value="([^"]+)"', text)
    assert "Delete 120 dead letters?" in text and shown_at is not None
    bury(letters, b"new", "new", died_at=current_millis() - 1000)

    ten_seconds_ago = (datetime.fromisoformat(shown_at[1]) - timedelta(seconds=10)).isoformat()
    form = {"form_token": form_token(asked), "all": "1", "shown_at": ten_seconds_ago, "shown": "120"}
    done = client.post("/dead-letters/all/delete", data=form, follow_redirects=True).get_data(as_text=True)

    left: Any = letters.client.zrange(f"{letters.namespace}:default.XQ", 0, -1)
    assert "Dead letters: 120 deleted." in done and left == [b"new"]


@pytest.mark.parametrize("action", ["requeue", pytest.param("delete", marks=pytest.mark.slow)])
def test_over_a_thousand_letters_are_changed_in_the_background(
    client: FlaskClient, log_in: LogIn, letters: RedisBroker, action: str
) -> None:
    for number in range(1100):
        message: Message[Any] = Message("bulk", "charge", (number,), {}, {})
        bury(letters, message.encode(), f"more-{number}", "bulk", died_at=current_millis() - 5000)
    log_in(client)
    held = letters.client.lock(f"{letters.namespace}:__requeue__", timeout=60)
    if action == "requeue":
        held.acquire()

    asked, done = confirmed(client, f"/dead-letters/all/{action}?all=1&queue=bulk")
    if action == "requeue":
        _, again = confirmed(client, "/dead-letters/all/delete?all=1")
        assert f"In the background: {action} dead letters (queue &#39;bulk&#39;)" in done
        assert "another change of dead letters is running" in again
        held.release()
    eventually(lambda: "In the background" not in client.get("/dead-letters").get_data(as_text=True))

    [entry] = logged_actions(1)
    assert f"{action.capitalize()} 1,100 dead letters?" in asked and "runs in the background" in asked
    assert entry.target == "1,100 dead letters: queue 'bulk'"
    assert entry.result == f"1,100 {action.removesuffix('e')}ed"
    assert (dead(letters, "bulk"), dead(letters, "default")) == (0, 90)
    assert len(queued(letters, "bulk")) == (1100 if action == "requeue" else 0)


def test_selected_letters_are_deleted_and_the_others_stay(
    client: FlaskClient, log_in: LogIn, letters: RedisBroker
) -> None:
    bury(letters, b"\xff", HOSTILE)
    log_in(client)
    page = client.get("/dead-letters").get_data(as_text=True)
    boxes = re.findall(r'type="checkbox" name="id" value="([^"]+)"', page)

    asked, done = confirmed(client, f"/dead-letters/all/delete?id={boxes[0]}&id={boxes[2]}&id=gone")

    assert "Delete 2 dead letters?" in asked and "1 selected dead letter was requeued or deleted meanwhile" in asked
    assert "Dead letters: 2 deleted." in done
    assert dead(letters, "default") + dead(letters, "mail") == 119
    assert "<script>alert" not in page + asked + done


def test_broken_letter_stays_and_is_named(client: FlaskClient, log_in: LogIn, letters: RedisBroker) -> None:
    bury(letters, b"\xff", "broken")
    log_in(client)

    _, done = confirmed(client, "/dead-letters/all/requeue?all=1&queue=default")

    assert "Dead letters: 90 requeued; 1 kept because it cannot be sent." in done
    assert "broken: kept: it cannot be sent" in done


def test_reader_sees_no_form_that_changes_letters(client: FlaskClient, letters: RedisBroker) -> None:
    page = client.get("/dead-letters").get_data(as_text=True)
    refused = client.post("/dead-letters/all/delete", data={"all": "1"})

    assert 'type="checkbox"' not in page and "Requeue selected" not in page
    assert refused.status_code == 302 and dead(letters, "default") == 90


@pytest.mark.parametrize(
    ("query", "asked", "done"),
    [("", 400, 400), ("actor=charge", 400, 400), ("id=", 200, 303)],
    ids=["nothing", "a filter without all", "an empty id"],
)
def test_nothing_selected_changes_nothing(
    client: FlaskClient, log_in: LogIn, letters: RedisBroker, query: str, asked: int, done: int
) -> None:
    log_in(client)
    form = {"form_token": form_token(client.get("/")), **dict(parse_qsl(query, keep_blank_values=True))}

    answers = client.get(f"/dead-letters/all/delete?{query}"), client.post("/dead-letters/all/delete", data=form)

    assert [answer.status_code for answer in answers] == [asked, done]
    assert (dead(letters, "default"), dead(letters, "mail")) == (90, 30)
