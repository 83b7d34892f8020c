"""Dashboard mounted into an application, below a path and behind the application's login."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Final

import pytest
import redis
from werkzeug.middleware.dispatcher import DispatcherMiddleware
from werkzeug.test import Client, TestResponse

from housekeeping import Settings, current_database, run_sweep
from housekeeping import web as dashboard
from tests.integration.web.conftest import TOKEN, form_token
from tests.internals.core import SettingsError
from tests.internals.database import Database
from tests.internals.ledger import logged_actions
from tests.internals.workers import configured_sweeps

ROOT: Final = "/ops/housekeeping"
WORKER: Final = "housekeeping.old_runs"
#: Each page that has links, forms or files of its own.
PAGES: Final = ("/", "/runs", "/runs/{}", "/processes", "/charts", "/database", "/coverage", "/erasures", "/errors")
PAGES_OF_WORKERS: Final = (f"/workers/{WORKER}", f"/workers/{WORKER}/plan", "/all/pause", "/dead-letters", "/no-page")
Mount = Callable[..., Client]


@pytest.fixture
def mount(settings: Settings, postgres: Database, redis_client: redis.Redis) -> Mount:
    """Return a browser of an application with the dashboard; the header ``X-User`` stands for its login."""
    only = settings.model_copy(update={"built_in": (), "web_token": TOKEN})

    def make(**parameters: Any) -> Client:
        return Client(DispatcherMiddleware(_not_found, {ROOT: dashboard.wsgi_app(only, **parameters)}))

    return make


def _not_found(environ: Any, start_response: Any) -> list[bytes]:
    start_response("404 Not Found", [])
    return [b"of the application"]


def _user(environ: Any) -> str | None:
    user: str | None = environ.get("HTTP_X_USER")
    return user


def _is_operator(environ: Any) -> bool:
    return _user(environ) == "kim"


def get(client: Client, path: str, user: str = "kim") -> TestResponse:
    return client.get(f"{ROOT}{path}", headers={"X-User": user})


def cookie_of(page: TestResponse) -> str:
    [value] = re.findall("housekeeping=([^;]+)", page.headers["Set-Cookie"])
    return str(value)


def pause(client: Client, form_of: TestResponse, user: str = "kim") -> TestResponse:
    sent = {"form_token": form_token(form_of), "reason": "peak"}
    return client.post(f"{ROOT}/workers/{WORKER}/pause", data=sent, headers={"X-User": user})


@pytest.mark.parametrize("path", [*PAGES, *PAGES_OF_WORKERS])
def test_every_link_form_and_file_is_below_the_mounted_path(mount: Mount, settings: Settings, path: str) -> None:
    run = run_sweep(configured_sweeps(settings)[WORKER])
    client = mount(user=_user, may_change=_is_operator)

    page = get(client, path.format(run.run_id)).get_data(as_text=True)

    addresses = re.findall(r'(?:href|src|action|formaction)="([^"]*)"', page)
    assert len(addresses) > 10 and [each for each in addresses if not each.startswith((f"{ROOT}/", "#"))] == []
    files = [
        client.get(each.replace("&amp;", "&"), buffered=True).status_code
        for each in addresses
        if f"{ROOT}/static/" in each
    ]
    assert set(files) == {200}


def test_changes_of_the_applications_user_are_logged_with_the_name(mount: Mount) -> None:
    client = mount(user=_user, may_change=_is_operator)

    answer = pause(client, get(client, f"/workers/{WORKER}"))

    assert (answer.status_code, answer.location) == (303, f"{ROOT}/workers/{WORKER}")
    assert "Path=/ops/housekeeping/;" in f"{answer.headers['Set-Cookie']};"
    [action] = logged_actions(10)
    assert (action.user.split("@")[0], action.action, action.target) == ("kim", "pause", WORKER)


@pytest.mark.parametrize(
    ("secrets", "status"),
    [(("shared", "shared"), 303), (("shared", "another"), 403), ((None, None), 403)],
    ids=["shared", "another", "random"],
)
def test_form_is_valid_in_another_process_with_the_same_secret(
    mount: Mount, secrets: tuple[str | None, str | None], status: int
) -> None:
    first, second = (mount(user=_user, may_change=_is_operator, secret_key=secret) for secret in secrets)
    page = get(first, f"/workers/{WORKER}")
    second.set_cookie("housekeeping", cookie_of(page), path=ROOT)

    assert pause(second, page).status_code == status


@pytest.mark.parametrize(
    ("parameters", "user", "read", "changed", "shown"),
    [
        ({"may_change": _is_operator}, "kim", 200, 303, "<button>Pause"),
        ({"may_change": _is_operator}, "eve", 200, 403, "You do not have permission to pause, narrow or resume it."),
        ({}, "kim", 200, 403, "You do not have permission to pause, narrow or resume it."),
        ({"may_change": _is_operator}, " ", 403, 403, "you are not logged in to the application"),
    ],
    ids=["may change", "may read", "without may_change", "without a name"],
)
def test_functions_of_the_application_decide_who_reads_and_changes(
    mount: Mount, parameters: dict[str, Any], user: str, read: int, changed: int, shown: str
) -> None:
    form = get(mount(user=_user, may_change=_is_operator, secret_key="shared"), f"/workers/{WORKER}")
    client = mount(user=_user, secret_key="shared", **parameters)
    client.set_cookie("housekeeping", cookie_of(form), path=ROOT)

    page = get(client, f"/workers/{WORKER}", user)
    answer = pause(client, form, user)

    assert (page.status_code, answer.status_code, len(logged_actions(10))) == (read, changed, changed == 303)
    assert shown in page.get_data(as_text=True)


def test_error_of_the_applications_function_refuses_the_request(mount: Mount) -> None:
    def fail(environ: Any) -> str:
        raise RuntimeError("the session store is unavailable")

    assert get(mount(user=fail), "/").status_code == 500


def test_token_login_works_below_the_mounted_path(mount: Mount) -> None:
    client = mount()

    asked = get(client, f"/workers/{WORKER}")
    form = client.get(asked.location)
    sent = {"token": TOKEN, "name": "kim", "form_token": form_token(form)}
    entered = client.post(asked.location, data=sent)
    worker = client.get(entered.location)
    left = client.post(f"{ROOT}/logout", data={"form_token": form_token(worker)})
    again = client.post(f"{ROOT}/logout", headers={"Referer": f"http://localhost{ROOT}/runs?since=2h"})

    assert asked.location == f"{ROOT}/login?next=/workers/{WORKER}?"
    assert entered.location == f"{ROOT}/workers/{WORKER}" and b'id="pause"' in worker.get_data()
    assert left.location == f"{ROOT}/" and again.location == f"{ROOT}/login?next=/runs?since%3D2h"


@pytest.mark.parametrize(("parameters", "told"), [({}, "WEB_TOKEN is not set"), ({"may_change": bool}, "without user")])
def test_dashboard_without_any_login_is_rejected(settings: Settings, parameters: dict[str, Any], told: str) -> None:
    with pytest.raises(SettingsError, match=told):
        dashboard.wsgi_app(settings.model_copy(update={"built_in": (), "web_token": None}), **parameters)


def test_requests_leave_no_connection_open(mount: Mount, postgres: Database) -> None:
    client = mount(user=_user)

    assert get(client, "/actions").status_code == 200

    assert current_database.is_closed()
