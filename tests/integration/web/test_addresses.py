"""Names and addresses of operators, the limit of wrong tokens, the cookie behind TLS, and the health pages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from flask.testing import FlaskClient
from werkzeug.test import TestResponse

from housekeeping import Settings
from tests.integration.web.conftest import TOKEN, WORKER, form_token
from tests.internals.core import SettingsError
from tests.internals.ledger import logged_actions, override_of
from tests.internals.web import Attempts

PAUSE = f"/workers/{WORKER}/pause"


def enter(client: FlaskClient, token: str = TOKEN, *, name: str = "", peer: str = "127.0.0.1", **headers: str) -> Any:
    given = {name.replace("_", "-"): value for name, value in headers.items()}
    at = {"REMOTE_ADDR": peer}
    word = form_token(client.get("/login", environ_overrides=at, headers=given))
    data = {"token": token, "name": name, "form_token": word}
    return client.post("/login", data=data, environ_overrides=at, headers=given)


def log() -> list[tuple[str, str, str | None]]:
    return [(each.user, each.action, each.result) for each in reversed(logged_actions(99))]


def test_name_and_address_of_the_login_are_in_the_log_of_actions(with_settings: Callable[..., FlaskClient]) -> None:
    client = with_settings()
    enter(client, "x" * 20, name="kim", peer="10.1.2.3")
    enter(client, name="kim", peer="10.1.2.3")

    word = form_token(client.get(f"/workers/{WORKER}"))
    client.post(PAUSE, data={"form_token": word}, environ_overrides={"REMOTE_ADDR": "10.1.2.3"})

    said = override_of(WORKER)
    assert said is not None and said.said_by == "kim@10.1.2.3"
    assert log() == [
        ("kim@10.1.2.3", "login", "failed: wrong token"),
        ("kim@10.1.2.3", "login", "may change"),
        ("kim@10.1.2.3", "pause", f"{WORKER} is paused until it is resumed"),
    ]


def test_actions_of_a_user_are_found_by_the_name_alone(with_settings: Callable[..., FlaskClient]) -> None:
    for name in ("kim", "kim_x", "kimberly"):
        enter(with_settings(), name=name)

    assert [each.user for each in logged_actions(9, user="kim")] == ["kim@127.0.0.1"]
    assert [each.user for each in logged_actions(9, user="kim_x@127.0.0.1")] == ["kim_x@127.0.0.1"]


def test_wrong_token_of_a_program_is_in_the_log_of_actions(with_settings: Callable[..., FlaskClient]) -> None:
    refused = with_settings().get("/", headers={"Authorization": "Bearer nonsense"})

    assert refused.status_code == 401 and log() == [("dashboard@127.0.0.1", "login", "failed: wrong token")]


@pytest.mark.parametrize(
    ("peer", "forwarded", "address"),
    [
        ("127.0.0.1", "203.0.113.7", "203.0.113.7"),
        ("::ffff:127.0.0.1", "203.0.113.7", "203.0.113.7"),
        ("127.0.0.1", "6.6.6.6, 203.0.113.7", "203.0.113.7"),
        ("127.0.0.1", "203.0.113.7, 10.0.0.5", "203.0.113.7"),
        ("127.0.0.1", "203.0.113.7:4711", "203.0.113.7"),
        ("127.0.0.1", "[2001:db8::7]:4711", "2001:db8::7"),
        ("127.0.0.1", "unknown", "127.0.0.1"),
        ("127.0.0.1", "203.0.113.7, unknown", "127.0.0.1"),
        ("127.0.0.1", ", ".join(["10.0.0.5"] * 1000), "10.0.0.5"),
        ("203.0.113.9", "6.6.6.6", "203.0.113.9"),
    ],
)
def test_client_address_is_the_last_that_is_no_trusted_proxy(
    with_settings: Callable[..., FlaskClient], peer: str, forwarded: str, address: str
) -> None:
    enter(
        with_settings(web_trusted_proxies=("127.0.0.0/8", "10.0.0.5/32")),
        name="kim",
        peer=peer,
        X_Forwarded_For=forwarded,
    )

    assert [user for user, _, _ in log()] == [f"kim@{address}"]


def test_without_a_trusted_proxy_its_headers_are_ignored(with_settings: Callable[..., FlaskClient]) -> None:
    client = with_settings(web_user_header="X-Forwarded-User")
    enter(client, name="kim", X_Forwarded_For="203.0.113.7", X_Forwarded_User="root")

    assert [user for user, _, _ in log()] == ["kim@127.0.0.1"]


def test_header_of_a_user_needs_a_trusted_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOUSEKEEPING_WEB_USER_HEADER", "X-Forwarded-User")

    with pytest.raises(SettingsError, match="WEB_USER_HEADER is set without HOUSEKEEPING_WEB_TRUSTED_PROXIES"):
        Settings.load()


def test_proxys_user_goes_before_the_name_that_is_typed(with_settings: Callable[..., FlaskClient]) -> None:
    client = with_settings(web_user_header="X-Forwarded-User", web_trusted_proxies=("127.0.0.1",))
    page = client.get("/login", headers={"X-Forwarded-User": "kim"}).get_data(as_text=True)
    enter(client, name="root", X_Forwarded_User="kim")

    assert "You are kim." in page and 'name="name"' not in page
    assert log() == [("kim@127.0.0.1", "login", "may change")]


def status_of(answer: TestResponse) -> tuple[int, str | None]:
    return answer.status_code, answer.headers.get("Retry-After")


def test_eleventh_wrong_token_of_an_address_has_to_wait(with_settings: Callable[..., FlaskClient]) -> None:
    client = with_settings()

    wrong = [status_of(enter(client, "x" * 20)) for _ in range(10)]
    refused = enter(client)
    by_header = client.get("/", headers={"Authorization": f"Bearer {TOKEN}"})
    elsewhere = enter(client, peer="10.1.2.3")

    assert wrong == [(401, None)] * 10
    for answer in (refused, by_header):
        status, seconds = status_of(answer)
        assert status == 429 and seconds is not None and 1 <= int(seconds) <= 10
        assert f"oo many wrong tokens from your address; try again in {seconds} s" in answer.get_data(as_text=True)
    assert elsewhere.status_code == 302
    assert len(log()) == 11  # a token that was not looked at is not logged


def test_right_token_gives_all_attempts_back(with_settings: Callable[..., FlaskClient]) -> None:
    client = with_settings()

    answers = [enter(client, token).status_code for token in [*["x" * 20] * 9, TOKEN] * 2]

    assert answers == [*[401] * 9, 302] * 2


def test_attempts_come_back_one_by_one() -> None:
    times = [100.0] * 10 + [100.0, 104.0, 110.0, 110.0, 125.0, 125.0, 1000.0]
    attempts = Attempts(iter(times).__next__)
    for _ in range(10):
        assert attempts.begin("10.0.0.1") == 0

    waits = [attempts.begin("10.0.0.1") for _ in times[10:]]

    assert waits == [10.0, 6.0, 0.0, 10.0, 0.0, 5.0, 0.0]


@pytest.mark.parametrize(
    ("other", "shared"),
    [("2001:db8:0:1::2", True), ("2001:db8:0:2::1", False), ("::ffff:10.0.0.1", False)],
)
def test_addresses_of_one_ipv6_network_share_their_attempts(other: str, shared: bool) -> None:
    attempts = Attempts(lambda: 0.0)
    for _ in range(10):
        attempts.begin("2001:db8:0:1::1")

    assert (attempts.begin(other) > 0) == shared


def test_attempts_of_many_addresses_use_bounded_memory() -> None:
    attempts = Attempts(lambda: 0.0)
    for _ in range(10):
        attempts.begin("192.0.2.1")

    for number in range(9_999):
        attempts.begin(f"10.0.{number // 250}.{number % 250}")
    known = attempts.begin("192.0.2.1")
    for number in range(10_000):
        attempts.begin(f"10.1.{number // 250}.{number % 250}")

    assert known > 0 and attempts.begin("192.0.2.1") == 0


@pytest.mark.parametrize(
    ("settings_given", "peer", "scheme", "secure"),
    [
        ({"web_trusted_proxies": ("127.0.0.1",)}, "127.0.0.1", "https", True),
        ({"web_trusted_proxies": ("127.0.0.1",)}, "127.0.0.1", "HTTPS, http", True),
        ({"web_trusted_proxies": ("127.0.0.1",)}, "127.0.0.1", "http", False),
        ({"web_trusted_proxies": ("127.0.0.1",)}, "10.1.2.3", "https", False),
        ({}, "127.0.0.1", "https", False),
        ({"web_https": True}, "10.1.2.3", "", True),
    ],
)
def test_cookie_is_secure_behind_tls(
    with_settings: Callable[..., FlaskClient], settings_given: dict[str, Any], peer: str, scheme: str, secure: bool
) -> None:
    answer = with_settings(**settings_given).get(
        "/login", environ_overrides={"REMOTE_ADDR": peer}, headers={"X-Forwarded-Proto": scheme}
    )

    cookie = answer.headers["Set-Cookie"]
    assert ("; Secure" in cookie) == secure and "; HttpOnly" in cookie and "SameSite=Strict" in cookie


def test_health_pages_need_no_login_and_say_nothing_else(with_settings: Callable[..., FlaskClient]) -> None:
    client = with_settings()

    answers = [client.get(path, headers={"Host": "10.0.0.7:9292"}) for path in ("/-/live", "/-/ready")]

    assert [(each.status_code, each.data) for each in answers] == [(200, b"ok\n")] * 2
    assert [each.headers.get("Set-Cookie") for each in answers] == [None, None]


def test_ready_page_is_unavailable_while_a_server_is(with_settings: Callable[..., FlaskClient]) -> None:
    client = with_settings(redis_url="redis://127.0.0.1:1/0", broker_url=None)

    answers = [client.get(path) for path in ("/-/live", "/-/ready")]

    assert [(each.status_code, each.data) for each in answers] == [(200, b"ok\n"), (503, b"unavailable\n")]
