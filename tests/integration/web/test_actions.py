"""Pause, narrow and plan forms."""

from __future__ import annotations

import re
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from flask.testing import FlaskClient

from housekeeping import Settings
from housekeeping.workers.user_status_cleanup.models import UserStatus
from tests.faults import at_step
from tests.integration.conftest import AddStatuses
from tests.integration.web.conftest import TOKEN, WORKER, LogIn, form_token
from tests.internals.leases import LeaseRow, new_token
from tests.internals.ledger import Override, Run, logged_actions, override_of, switch
from tests.internals.web import create_app, plans
from tests.internals.workers import status_sweep as sweep

PATH = f"/workers/{WORKER}"
NOW = datetime.now(UTC)


@pytest.fixture
def word(client: FlaskClient, log_in: LogIn) -> str:
    log_in(client)
    return form_token(client.get(PATH))


def test_narrow_form_sets_limits_that_the_page_shows(client: FlaskClient, word: str) -> None:
    form = {"form_token": word, "batch_size": "10", "max_runtime_s": "5", "reason": "peak", "until": "2h"}

    done = client.post(f"{PATH}/narrow", data=form)
    page = client.get(PATH).get_data(as_text=True)

    said = override_of(WORKER)
    assert done.status_code == 303 and said is not None
    assert (said.state, said.batch_size, said.max_runtime, said.reason) == ("narrow", 10, timedelta(seconds=5), "peak")
    assert f"{WORKER} is narrowed to 10 records a batch and 5 s a run until" in page
    assert ">Resume</button>" in page and ">Pause</button>" in page


def test_reason_with_control_characters_is_stored_escaped(client: FlaskClient, word: str) -> None:
    done = client.post(f"{PATH}/pause", data={"form_token": word, "reason": " a\0b\nc "})

    said = override_of(WORKER)
    assert done.status_code == 303 and said is not None
    assert said.reason == "a\\x00b\\nc"


@pytest.mark.parametrize("number", ["0", "-1", "10001", "1e3", "x", "１０", "9" * 5000])
def test_number_out_of_range_is_rejected(client: FlaskClient, word: str, number: str) -> None:
    refused = client.post(f"{PATH}/narrow", data={"form_token": word, "batch_size": number})

    assert refused.status_code == 400 and override_of(WORKER) is None
    assert "is not a number from 1 to 10,000" in refused.get_data(as_text=True)


def test_narrow_without_a_number_is_rejected(client: FlaskClient, word: str) -> None:
    refused = client.post(f"{PATH}/narrow", data={"form_token": word, "batch_size": ""})

    assert refused.status_code == 400 and "nothing to narrow" in refused.get_data(as_text=True)


@pytest.fixture
def many(settings: Settings, client: FlaskClient, log_in: LogIn) -> FlaskClient:
    """Return a person at a dashboard with three workers; one of them is paused, another one is narrowed."""
    sweeps = {name: replace(sweep, name=name) for name in (WORKER, "b", "c")}
    person = create_app(settings, sweeps, TOKEN, open_to_read=True).test_client()
    log_in(person)
    switch(Override("b", "paused", "moves", said_by="kim@ops"))
    switch(Override("c", "narrow", batch_size=5))
    return person


def test_pause_of_all_keeps_a_pause_that_lasts_longer(many: FlaskClient) -> None:
    asked = many.get("/all/pause")
    form = {"form_token": form_token(asked), "reason": "incident", "until": "2h"}

    done = many.post("/all/pause", data=form, follow_redirects=True).get_data(as_text=True)

    found = [override_of(name) for name in (WORKER, "b", "c")]
    assert "Pause all 3 workers?" in asked.get_data(as_text=True)
    assert [each and (each.state, each.reason, each.until is None) for each in found] == [
        ("paused", "incident", False),
        ("paused", "moves", True),
        ("paused", "incident", False),
    ]
    assert "3 workers done." in done and "kept: b is paused until it is resumed: moves" in done
    assert [each.target for each in logged_actions(3)] == ["c", "b", WORKER]


def test_pause_of_all_replaces_a_pause_that_ends_earlier(many: FlaskClient) -> None:
    switch(Override("b", "paused", "moves", NOW + timedelta(minutes=5)))

    many.post("/all/pause", data={"form_token": form_token(many.get("/all/pause")), "reason": "incident"})

    said = override_of("b")
    assert said is not None and (said.reason, said.until) == ("incident", None)


def test_wrong_end_of_the_pause_of_all_changes_nothing(many: FlaskClient) -> None:
    form = {"form_token": form_token(many.get("/all/pause")), "until": "soon"}

    answer = many.post("/all/pause", data=form)

    assert answer.status_code == 400 and 'value="soon"' in answer.get_data(as_text=True)
    assert override_of(WORKER) is None


def test_selected_workers_are_resumed_and_the_others_stay(many: FlaskClient) -> None:
    asked = many.get("/all/resume")
    boxes = re.findall(r'type="checkbox" name="name" value="([^"]+)"', asked.get_data(as_text=True))

    done = many.post("/all/resume", data={"form_token": form_token(asked), "name": ["c"]}, follow_redirects=True)

    assert boxes == ["b", "c"] and "moves (kim@ops)" in asked.get_data(as_text=True)
    assert "1 worker done." in done.get_data(as_text=True)
    assert override_of("c") is None and override_of("b") is not None


def test_reader_cannot_pause_all(client: FlaskClient) -> None:
    page = client.get("/all/pause").get_data(as_text=True)
    refused = client.post("/all/pause", data={})

    assert "<button" not in page.split("<main")[1] and "Pause all…" not in client.get("/").get_data(as_text=True)
    assert refused.status_code == 302 and override_of(WORKER) is None


def test_plan_page_shows_counts_and_changes_nothing(client: FlaskClient) -> None:
    UserStatus.insert_many(
        [{"user_id": each, "clear_status_at": NOW - timedelta(hours=1)} for each in (1, 2, 3)]
    ).execute()

    page = client.get(f"{PATH}/plan").get_data(as_text=True)

    assert "<strong>3</strong> rows are stale." in page
    assert "1 of 100 rows at most" in page
    assert '<dd class="number">3</dd>' in page and "<caption>First rows</caption>" in page
    assert (UserStatus.select().count(), Run.select().count()) == (3, 0)


def test_plan_page_counts_up_to_its_limit(client: FlaskClient, add_statuses: AddStatuses) -> None:
    add_statuses(100_001, "now() - interval '1 hour'")

    page = client.get(f"{PATH}/plan").get_data(as_text=True)

    assert "<strong>at least 100,000</strong>" in page


@pytest.mark.parametrize(
    ("site", "status"), [("cross-site", 403), ("same-site", 403), ("same-origin", 200), ("none", 200)]
)
def test_plan_requested_by_another_site_is_rejected(client: FlaskClient, site: str, status: int) -> None:
    assert client.get(f"{PATH}/plan", headers={"Sec-Fetch-Site": site}).status_code == status


def test_second_plan_at_the_same_time_is_rejected_at_once(client: FlaskClient) -> None:
    beside = []

    def meanwhile() -> None:
        beside.append(client.application.test_client().get(f"{PATH}/plan"))

    with at_step(plans, "make_plan", "before", meanwhile):
        first = client.get(f"{PATH}/plan")

    assert (first.status_code, [answer.status_code for answer in beside]) == (200, [503])
    assert client.get(f"{PATH}/plan").status_code == 200


def test_plan_with_a_wrong_argument_is_rejected(client: FlaskClient) -> None:
    refused = client.get(f"{PATH}/plan", query_string={"argument": "<script>"})

    assert refused.status_code == 400 and "takes no argument" in refused.get_data(as_text=True)
    assert "<script>" not in refused.get_data(as_text=True)


def test_first_page_without_redis_shows_a_warning_and_the_rest(client: FlaskClient, settings: Settings) -> None:
    LeaseRow.create(key="nightly", epoch=7, holder=new_token(WORKER))
    now = datetime.now(UTC)
    Run.create(worker=WORKER, trigger="schedule", epoch=7, started_at=now, heartbeat_at=now)
    away = {"redis_url": "unix:///nowhere/redis.sock", "broker_url": None}
    app = create_app(settings.model_copy(update=away), {WORKER: sweep}, TOKEN, open_to_read=True)

    page = app.test_client().get("/")
    text = page.get_data(as_text=True)

    assert page.status_code == 200 and text.count("Redis did not answer") == 1
    assert WORKER in text and "these are the leases of open runs" in text
    assert re.findall(r'class="outcome (\w+)"', text) == ["running"]
    assert '<th scope="row">nightly</th>' in text
    assert app.test_client().get(PATH).status_code == 200
