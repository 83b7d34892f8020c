"""Logins, the right to read only, the user's name, and forms that were sent after a logout."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from flask import Flask
from flask.testing import FlaskClient
from werkzeug.test import TestResponse

from housekeeping import Settings
from tests.integration.web.conftest import TOKEN, WORKER, LogIn, form_token
from tests.internals.core import SettingsError
from tests.internals.ledger import logged_actions, override_of, overrides
from tests.internals.web import Logins

READ_TOKEN = "a-token-to-read-only"
PATH = f"/workers/{WORKER}"
COOKIE = "housekeeping"


def enter(client: FlaskClient, token: str) -> TestResponse:
    return client.post("/login", data={"token": token, "form_token": form_token(client.get("/login"))})


def cookie_of(client: FlaskClient) -> str:
    found = client.get_cookie(COOKIE)
    assert found is not None
    return found.value


def test_cookie_is_worthless_after_the_logout(make_app: Callable[[bool], Flask], log_in: LogIn) -> None:
    client = make_app(False).test_client()
    log_in(client)
    word, cookie = form_token(client.get("/")), cookie_of(client)

    client.post("/logout", data={"form_token": word})
    client.set_cookie(COOKIE, cookie)

    assert client.get("/").status_code == 302
    assert client.post(f"{PATH}/pause", data={"form_token": word}).status_code == 302 and WORKER not in overrides()


def test_cookie_is_worthless_in_another_process(make_app: Callable[[bool], Flask], log_in: LogIn) -> None:
    first, second = make_app(False).test_client(), make_app(False).test_client()
    log_in(first)

    second.set_cookie(COOKIE, cookie_of(first))

    assert (first.get("/").status_code, second.get("/").status_code) == (200, 302)


def test_unused_and_surplus_logins_end() -> None:
    logins = Logins()
    first, second = logins.begin("change"), logins.begin("read")
    found = logins.find(first)
    assert found is not None and found.role == "change"

    for _ in range(999):
        logins.begin("read")

    assert logins.find(first) is not None and logins.find(second) is None
    found.used_at -= 13 * 3600
    assert logins.find(first) is None


def test_form_sent_after_the_logout_leads_to_the_login_and_to_its_page(client: FlaskClient) -> None:
    page = {"Referer": f"http://localhost{PATH}?a=b"}

    asked = client.post(f"{PATH}/pause", data={"form_token": form_token(client.get("/login"))}, headers=page)
    login_page = client.get(asked.location)
    entered = client.post(asked.location, data={"token": TOKEN, "form_token": form_token(login_page)})

    assert "You were logged out, so the form was not carried out" in login_page.get_data(as_text=True)
    assert entered.location == f"{PATH}?a=b" and WORKER not in overrides()
    assert client.get(entered.location).status_code == 200


@pytest.mark.parametrize("page", ["", "https://evil.example/", "http://localhost//evil.example"])
def test_form_of_no_page_of_the_dashboard_leads_to_the_first_page(client: FlaskClient, page: str) -> None:
    asked = client.post(f"{PATH}/pause", headers={"Referer": page})
    word = form_token(client.get(asked.location))

    assert client.post(asked.location, data={"token": TOKEN, "form_token": word}).location == "/"


def test_form_of_another_site_is_rejected_without_a_login(client: FlaskClient) -> None:
    assert client.post(f"{PATH}/pause", headers={"Origin": "https://evil.example"}).status_code == 403


@pytest.mark.parametrize("open_to_read", [True, False], ids=["open", "closed"])
def test_confirmation_is_shown_once_on_the_next_opened_page(
    make_app: Callable[[bool], Flask], log_in: LogIn, open_to_read: bool
) -> None:
    client = make_app(open_to_read).test_client()
    log_in(client)
    client.post(f"{PATH}/pause", data={"form_token": form_token(client.get(PATH))})

    client.head(PATH)
    client.get(PATH, headers={"X-Refresh": "1"})
    opened, refreshed, other = (client.get(PATH), client.get(PATH, headers={"X-Refresh": "1"}), client.get("/"))

    shown = [
        f">{WORKER} is paused until it is resumed.</p>" in each.get_data(as_text=True)
        for each in (opened, refreshed, other)
    ]
    assert shown == [True, False, False]


def test_wrong_input_is_shown_beside_its_field_with_the_typed_text(client: FlaskClient, log_in: LogIn) -> None:
    log_in(client)
    data = {"form_token": form_token(client.get(PATH)), "batch_size": "many", "reason": '"peak"', "until": "soon"}

    refused = client.post(f"{PATH}/narrow", data=data)
    page = refused.get_data(as_text=True)
    form = page.split('id="narrow"')[1]

    assert refused.status_code == 400 and override_of(WORKER) is None and "Nothing was changed: 2 fields" in page
    assert 'value="many" aria-invalid="true" aria-describedby="error-batch_size"' in form
    assert 'value="&#34;peak&#34;"' in form and 'id="error-until">&#39;soon&#39; is not a time' in form
    assert 'value="&#34;peak&#34;"' not in page.split('id="pause"')[1].split("</form>")[0]


def test_read_token_shows_pages_and_changes_nothing(with_settings: Callable[..., FlaskClient]) -> None:
    client = with_settings(web_read_token=READ_TOKEN)
    enter(client, READ_TOKEN)
    page = client.get(PATH)

    refused = client.post(f"{PATH}/pause", data={"form_token": form_token(page)})
    by_header = [
        client.application.test_client().open(path, method=method, headers={"Authorization": f"Bearer {READ_TOKEN}"})
        for method, path in (("GET", PATH), ("POST", f"{PATH}/pause"))
    ]

    assert page.status_code == 200 and ">Pause</button>" not in page.get_data(as_text=True)
    assert refused.status_code == 403 and "may only read" in refused.get_data(as_text=True)
    assert [answer.status_code for answer in by_header] == [200, 403] and WORKER not in overrides()
    assert client.post("/logout", data={"form_token": form_token(page)}).status_code == 302


def test_read_token_must_differ_from_the_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOUSEKEEPING_WEB_TOKEN", TOKEN)
    monkeypatch.setenv("HOUSEKEEPING_WEB_READ_TOKEN", TOKEN)

    with pytest.raises(SettingsError, match="HOUSEKEEPING_WEB_READ_TOKEN is HOUSEKEEPING_WEB_TOKEN"):
        Settings.load()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("proxy", "peer", "user"),
    [
        ("127.0.0.0/8", "127.0.0.1", "kim@127.0.0.1"),
        ("127.0.0.0/8", "::ffff:127.0.0.1", "kim@127.0.0.1"),
        ("10.0.0.5/32", "10.0.0.5", "kim@10.0.0.5"),
        ("10.0.0.5/32", "127.0.0.1", "dashboard@127.0.0.1"),
        ("127.0.0.0/8", "10.0.0.5", "dashboard@10.0.0.5"),
        ("127.0.0.0/8", "", "dashboard"),
    ],
)
def test_user_is_named_by_a_trusted_proxy_only(
    with_settings: Callable[..., FlaskClient], proxy: str, peer: str, user: str
) -> None:
    client = with_settings(web_user_header="X-Forwarded-User", web_trusted_proxies=(proxy,))
    headers = {"Authorization": f"Bearer {TOKEN}", "X-Forwarded-User": "kim"}

    client.post(f"{PATH}/pause", headers=headers, environ_overrides={"REMOTE_ADDR": peer})

    said = override_of(WORKER)
    assert said is not None and said.said_by == user
    assert [(each.user, each.action, each.target) for each in logged_actions(9)] == [(user, "pause", WORKER)]


def test_user_header_is_ignored_unless_it_is_set(with_settings: Callable[..., FlaskClient]) -> None:
    with_settings().post(f"{PATH}/pause", headers={"Authorization": f"Bearer {TOKEN}", "X-Forwarded-User": "kim"})

    assert logged_actions(1)[0].user == "dashboard@127.0.0.1"


def test_hostile_user_name_is_escaped_and_bounded(with_settings: Callable[..., FlaskClient]) -> None:
    client = with_settings(web_user_header="X-Forwarded-User", web_trusted_proxies=("127.0.0.1",))
    name = "<b>\x1b" + "ä".encode().decode("latin-1") + "x" * 300

    client.post(f"{PATH}/pause", headers={"Authorization": f"Bearer {TOKEN}", "X-Forwarded-User": name})
    enter(client, TOKEN)
    page = client.get("/actions").get_data(as_text=True)

    user = logged_actions(9, target=WORKER)[0].user
    assert user.startswith("<b>\\x1bäx") and len(user) == 100 + len("@127.0.0.1")
    assert "<b>" not in page and "&lt;b&gt;" in page


@pytest.mark.slow
def test_actions_page_filters_and_pages(client: FlaskClient) -> None:
    for number in range(52):
        client.post(
            f"{PATH}/pause", data={"reason": f"number {number:02}"}, headers={"Authorization": f"Bearer {TOKEN}"}
        )

    newest = client.get("/actions", query_string={"target": WORKER}).get_data(as_text=True)
    older = client.get(re.findall(r'href="(/actions\?[^"]+)"', newest)[0].replace("&amp;", "&")).get_data(as_text=True)

    assert "number 51" in newest and "number 02" in newest and "number 01" not in newest
    assert re.findall(r"number (\d\d)", older) == ["01", "00"]
    assert "no actions" in client.get("/actions?user=nobody").get_data(as_text=True)
