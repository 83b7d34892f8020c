from __future__ import annotations

from collections.abc import Callable

import pytest
from flask import Flask
from flask.testing import FlaskClient

from housekeeping.sweeps.switches import is_paused
from housekeeping.web import security
from tests.integration.web.conftest import TOKEN, WORKER, LogIn, form_token

PAUSE = f"/workers/{WORKER}/pause"


@pytest.fixture(autouse=True)
def no_pause_after_a_wrong_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(security, "_PAUSE_S", 0)


def test_on_loopback_everybody_may_look(client: FlaskClient) -> None:
    assert [client.get(path).status_code for path in ("/", f"/workers/{WORKER}")] == [200, 200]


def test_elsewhere_nothing_is_shown_without_the_token(make_app: Callable[[bool], Flask], log_in: LogIn) -> None:
    client = make_app(False).test_client()

    asked = client.get("/")
    log_in(client)

    assert (asked.status_code, asked.location) == (302, "/login?next=/?")
    assert client.get("/").status_code == 200


def test_to_change_something_takes_the_token_on_loopback_too(client: FlaskClient) -> None:
    refused = client.post(PAUSE, data={"form_token": form_token(client.get("/login"))})

    assert (refused.status_code, refused.location) == (302, "/login?next=/")
    assert not is_paused(WORKER)


def test_a_wrong_token_opens_nothing(client: FlaskClient) -> None:
    word = form_token(client.get("/login"))

    refused = client.post("/login", data={"token": TOKEN[:-1], "form_token": word})

    assert refused.status_code == 401
    assert client.post(PAUSE, data={"form_token": word}).status_code == 302 and not is_paused(WORKER)


def test_a_form_of_another_page_changes_nothing(client: FlaskClient, log_in: LogIn) -> None:
    log_in(client)
    word = form_token(client.get(f"/workers/{WORKER}"))

    without = client.post(PAUSE)
    wrong = client.post(PAUSE, data={"form_token": "x"})
    elsewhere = client.post(PAUSE, data={"form_token": word}, headers={"Origin": "https://evil.example"})

    assert [refused.status_code for refused in (without, wrong, elsewhere)] == [403, 403, 403]
    assert not is_paused(WORKER)


def test_a_program_may_use_the_token_as_a_bearer(client: FlaskClient) -> None:
    wrong = client.post(PAUSE, headers={"Authorization": "Bearer nonsense"})
    right = client.post(PAUSE, headers={"Authorization": f"Bearer {TOKEN}"})

    assert (wrong.status_code, right.status_code, is_paused(WORKER)) == (401, 303, True)


def test_a_name_elsewhere_that_leads_here_is_refused(client: FlaskClient) -> None:
    assert client.get("/", headers={"Host": "evil.example:9292"}).status_code == 403
    assert client.get("/", headers={"Host": "127.0.0.1:9292"}).status_code == 200
    assert client.get("/", headers={"Host": "[::1]:9292"}).status_code == 200


@pytest.mark.parametrize("following", ["https://evil.example", "//evil.example", "/\\evil.example"])
def test_logging_in_leads_to_no_other_site(client: FlaskClient, following: str) -> None:
    word = form_token(client.get("/login"))

    entered = client.post("/login", query_string={"next": following}, data={"token": TOKEN, "form_token": word})

    assert (entered.status_code, entered.location) == (302, "/")


def test_every_answer_forbids_what_pages_do_not_need(client: FlaskClient) -> None:
    for path in ("/", "/login", "/nothing/here", "/static/style.css"):
        with client.get(path) as answer:
            headers = answer.headers
        assert "default-src 'none'" in headers["Content-Security-Policy"]
        assert (headers["X-Content-Type-Options"], headers["X-Frame-Options"]) == ("nosniff", "DENY")


@pytest.mark.parametrize(
    ("host", "local"),
    [("127.0.0.1", True), ("::1", True), ("[::1]", True), ("localhost", True), ("0.0.0.0", False), ("10.0.0.1", False)],
)
def test_an_address_that_others_can_reach_is_known(host: str, local: bool) -> None:
    assert security.is_loopback(host) == local
