from __future__ import annotations

from collections.abc import Callable

import pytest
from flask import Flask
from flask.testing import FlaskClient

from housekeeping.core.settings import Settings
from housekeeping.sweeps.ledger.overrides import overrides
from housekeeping.web import security
from housekeeping.web.application import create_app
from tests.integration.web.conftest import TOKEN, WORKER, LogIn, form_token

PAUSE = f"/workers/{WORKER}/pause"


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
    assert WORKER not in overrides()


def addresses_that_change() -> list[str]:
    """Of every endpoint there is that takes a POST, so that a new one is not forgotten."""
    nowhere = Settings.load(database_url="postgresql:///nowhere", redis_url="redis://nowhere")
    rules = create_app(nowhere, {}, TOKEN, open_to_read=True).url_map.iter_rules()
    changing = [rule for rule in rules if not {"GET", "HEAD", "OPTIONS"} >= (rule.methods or set())]
    return sorted(rule.rule.replace("<name>", WORKER) for rule in changing)


def test_what_can_be_changed_is_known() -> None:
    assert addresses_that_change() == [
        "/dead-letters/requeue",
        "/leases/release",
        "/login",
        "/logout",
        f"/workers/{WORKER}/narrow",
        f"/workers/{WORKER}/pause",
        f"/workers/{WORKER}/resume",
    ]


@pytest.mark.parametrize("address", addresses_that_change())
def test_nothing_is_changed_without_a_token_whatever_is_sent(client: FlaskClient, address: str) -> None:
    word = form_token(client.get("/login"))

    refused = client.post(address, query_string={"key": "k", "id": "1"}, data={"form_token": word, "batch_size": "1"})

    assert (refused.status_code, refused.location) in [(302, "/login?next=/"), (401, None)]


@pytest.mark.parametrize("address", addresses_that_change())
def test_a_form_without_the_sessions_word_is_refused_wherever_it_is_sent(
    client: FlaskClient, log_in: LogIn, address: str
) -> None:
    log_in(client)

    answers = [
        client.post(address, query_string={"key": "k", "id": "1"}, data=data)
        for data in ({"batch_size": "1"}, {"form_token": "x"})
    ]

    assert [answer.status_code for answer in answers] == [403, 403]
    assert "this form has expired or is not from this dashboard" in answers[0].get_data(as_text=True)


def test_a_wrong_token_opens_nothing(client: FlaskClient) -> None:
    word = form_token(client.get("/login"))

    refused = client.post("/login", data={"token": TOKEN[:-1], "form_token": word})

    assert refused.status_code == 401
    assert client.post(PAUSE, data={"form_token": word}).status_code == 302 and WORKER not in overrides()


def test_a_form_of_another_page_changes_nothing(client: FlaskClient, log_in: LogIn) -> None:
    log_in(client)
    word = form_token(client.get(f"/workers/{WORKER}"))

    without = client.post(PAUSE)
    wrong = client.post(PAUSE, data={"form_token": "x"})
    elsewhere = client.post(PAUSE, data={"form_token": word}, headers={"Origin": "https://evil.example"})

    assert [refused.status_code for refused in (without, wrong, elsewhere)] == [403, 403, 403]
    assert WORKER not in overrides()


def test_behind_a_proxy_that_speaks_tls_forms_of_our_own_pages_are_taken(
    make_app: Callable[[bool], Flask],
) -> None:
    client = make_app(False).test_client()
    ours = {"Host": "hk.example", "Origin": "https://hk.example"}
    word = form_token(client.get("/login", headers={"Host": "hk.example"}))

    entered = client.post("/login", data={"token": TOKEN, "form_token": word}, headers=ours)

    assert entered.status_code == 302


@pytest.mark.parametrize(
    "origin", ["null", "https://evil.example", "https://hk.example:444", "https://hk.example@evil"]
)
def test_behind_a_proxy_forms_of_other_pages_are_refused(make_app: Callable[[bool], Flask], origin: str) -> None:
    client = make_app(False).test_client()
    word = form_token(client.get("/login", headers={"Host": "hk.example"}))

    refused = client.post(
        "/login", data={"token": TOKEN, "form_token": word}, headers={"Host": "hk.example", "Origin": origin}
    )

    assert refused.status_code == 403


def test_a_program_may_use_the_token_as_a_bearer(client: FlaskClient) -> None:
    wrong = client.post(PAUSE, headers={"Authorization": "Bearer nonsense"})
    right = client.post(PAUSE, headers={"Authorization": f"Bearer {TOKEN}"})

    assert (wrong.status_code, right.status_code, WORKER in overrides()) == (401, 303, True)


def test_a_name_elsewhere_that_leads_here_is_refused(client: FlaskClient) -> None:
    assert client.get("/", headers={"Host": "evil.example:9292"}).status_code == 403
    assert client.get("/", headers={"Host": "127.0.0.1:9292"}).status_code == 200
    assert client.get("/", headers={"Host": "[::1]:9292"}).status_code == 200


@pytest.mark.parametrize(
    "following",
    ["https://evil.example", "//evil.example", "/\\evil.example", "/\t/evil.example", "/\n/evil.example", "/a\r\nb: c"],
)
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
