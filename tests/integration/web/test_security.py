from __future__ import annotations

from collections.abc import Callable

import pytest
from flask import Flask
from flask.testing import FlaskClient

from housekeeping import Settings
from tests.integration.web.conftest import TOKEN, WORKER, LogIn, form_token
from tests.internals.ledger import overrides
from tests.internals.web import create_app, security

PAUSE = f"/workers/{WORKER}/pause"


def test_loopback_pages_are_readable_without_the_token(client: FlaskClient) -> None:
    assert [client.get(path).status_code for path in ("/", f"/workers/{WORKER}")] == [200, 200]


def test_other_addresses_require_the_token_for_reading(make_app: Callable[[bool], Flask], log_in: LogIn) -> None:
    client = make_app(False).test_client()

    asked = client.get("/")
    log_in(client)

    assert (asked.status_code, asked.location) == (302, "/login?next=/?")
    assert client.get("/").status_code == 200


def test_changes_require_the_token_on_loopback(client: FlaskClient) -> None:
    refused = client.post(PAUSE, data={"form_token": form_token(client.get("/login"))})

    assert (refused.status_code, refused.location) == (302, "/login?next=/")
    assert WORKER not in overrides()


def addresses_that_change() -> list[str]:
    """Return the paths of all endpoints that accept POST, so that a new one is not forgotten."""
    nowhere = Settings.load(database_url="postgresql:///nowhere", redis_url="redis://nowhere")
    rules = create_app(nowhere, {}, TOKEN, open_to_read=True).url_map.iter_rules()
    changing = [rule for rule in rules if not {"GET", "HEAD", "OPTIONS"} >= (rule.methods or set())]
    return sorted(
        rule.rule.replace("<name>", WORKER).replace("<action>", "delete").replace("<label>", "1") for rule in changing
    )


def test_routes_that_change_something_are_known() -> None:
    assert addresses_that_change() == [
        "/alerts/acknowledge",
        "/all/pause",
        "/all/resume",
        "/dead-letters/all/delete",
        "/dead-letters/requeue",
        "/leases/release",
        "/login",
        "/logout",
        "/runs/1/stop",
        f"/workers/{WORKER}/narrow",
        f"/workers/{WORKER}/pause",
        f"/workers/{WORKER}/resume",
        f"/workers/{WORKER}/run",
    ]


@pytest.mark.parametrize("address", addresses_that_change())
def test_no_route_changes_anything_without_the_token(client: FlaskClient, address: str) -> None:
    word = form_token(client.get("/login"))

    refused = client.post(address, query_string={"key": "k", "id": "1"}, data={"form_token": word, "batch_size": "1"})

    assert (refused.status_code, refused.location) in [(302, "/login?next=/"), (401, None)]


@pytest.mark.parametrize("address", addresses_that_change())
def test_every_route_rejects_a_form_without_the_form_token(client: FlaskClient, log_in: LogIn, address: str) -> None:
    log_in(client)

    answers = [
        client.post(address, query_string={"key": "k", "id": "1"}, data=data)
        for data in ({"batch_size": "1"}, {"form_token": "x"})
    ]

    assert [answer.status_code for answer in answers] == [403, 403]
    assert "this form has expired or is not from this dashboard" in answers[0].get_data(as_text=True)


def test_wrong_token_allows_nothing(client: FlaskClient) -> None:
    word = form_token(client.get("/login"))

    refused = client.post("/login", data={"token": TOKEN[:-1], "form_token": word})

    assert refused.status_code == 401
    assert client.post(PAUSE, data={"form_token": word}).status_code == 302 and WORKER not in overrides()


def test_form_from_another_site_is_rejected(client: FlaskClient, log_in: LogIn) -> None:
    log_in(client)
    word = form_token(client.get(f"/workers/{WORKER}"))

    without = client.post(PAUSE)
    wrong = client.post(PAUSE, data={"form_token": "x"})
    elsewhere = client.post(PAUSE, data={"form_token": word}, headers={"Origin": "https://evil.example"})

    assert [refused.status_code for refused in (without, wrong, elsewhere)] == [403, 403, 403]
    assert WORKER not in overrides()


def test_own_form_is_accepted_behind_a_tls_proxy(
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
def test_form_from_another_site_is_rejected_behind_a_proxy(make_app: Callable[[bool], Flask], origin: str) -> None:
    client = make_app(False).test_client()
    word = form_token(client.get("/login", headers={"Host": "hk.example"}))

    refused = client.post(
        "/login", data={"token": TOKEN, "form_token": word}, headers={"Host": "hk.example", "Origin": origin}
    )

    assert refused.status_code == 403


def test_bearer_token_allows_changes(client: FlaskClient) -> None:
    wrong = client.post(PAUSE, headers={"Authorization": "Bearer nonsense"})
    right = client.post(PAUSE, headers={"Authorization": f"Bearer {TOKEN}"})

    assert (wrong.status_code, right.status_code, WORKER in overrides()) == (401, 303, True)


def test_foreign_host_name_is_rejected_on_loopback(client: FlaskClient) -> None:
    assert client.get("/", headers={"Host": "evil.example:9292"}).status_code == 403
    assert client.get("/", headers={"Host": "127.0.0.1:9292"}).status_code == 200
    assert client.get("/", headers={"Host": "[::1]:9292"}).status_code == 200


@pytest.mark.parametrize(
    "following",
    ["https://evil.example", "//evil.example", "/\\evil.example", "/\t/evil.example", "/\n/evil.example", "/a\r\nb: c"],
)
def test_login_redirects_only_to_own_paths(client: FlaskClient, following: str) -> None:
    word = form_token(client.get("/login"))

    entered = client.post("/login", query_string={"next": following}, data={"token": TOKEN, "form_token": word})

    assert (entered.status_code, entered.location) == (302, "/")


def test_every_response_has_the_security_headers(client: FlaskClient) -> None:
    for path in ("/", "/login", "/nothing/here", "/static/style.css"):
        with client.get(path) as answer:
            headers = answer.headers
        assert "default-src 'none'" in headers["Content-Security-Policy"]
        assert (headers["X-Content-Type-Options"], headers["X-Frame-Options"]) == ("nosniff", "DENY")


@pytest.mark.parametrize(
    ("host", "local"),
    [("127.0.0.1", True), ("::1", True), ("[::1]", True), ("localhost", True), ("0.0.0.0", False), ("10.0.0.1", False)],
)
def test_loopback_addresses_are_recognized(host: str, local: bool) -> None:
    assert security.is_loopback(host) == local
