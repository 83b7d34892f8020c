"""The page of a run: a silent one says so, a running one can be stopped, and archived rows can be restored."""

from __future__ import annotations

import re
from datetime import timedelta
from typing import Any

import pytest
import redis
from flask.testing import FlaskClient

from housekeeping import Settings
from tests.integration.archives.tickets import create, create_archives, fill
from tests.integration.archives.tickets import sweep as tickets
from tests.integration.web.conftest import TOKEN, WORKER, LogIn, form_token
from tests.internals.database import Database
from tests.internals.engine import restoration_of, run_sweep
from tests.internals.ledger import NOW, Override, Run, logged_actions, switch
from tests.internals.web import create_app

pytestmark = pytest.mark.one_database_only(reason="the test names runs of the only database")

#: A login without a name, from the browser of the tests.
USER = "dashboard@127.0.0.1"


def open_run(silent_s: float = 0, **given: Any) -> int:
    at = NOW - timedelta(seconds=silent_s)
    moments = {"started_at": at - timedelta(seconds=100), "heartbeat_at": at}
    run_id: int = Run.create(
        worker=WORKER, trigger="schedule", **{"counts": {"deleted_rows": 5000}, **moments, **given}
    ).id
    return run_id


def page_of(client: FlaskClient, path: str) -> str:
    return client.get(path).get_data(as_text=True)


def test_run_without_heartbeats_is_silent_and_has_no_rate(client: FlaskClient) -> None:
    run_id = open_run(silent_s=41)

    pages = [page_of(client, path) for path in (f"/runs/{run_id}", "/runs", f"/workers/{WORKER}", "/")]

    assert all(re.search(r"silent for 4\d s<", page) for page in pages)
    assert not any("rows/s" in page or "running</span>" in page for page in pages)


def test_rate_of_a_run_is_that_until_its_last_heartbeat(client: FlaskClient) -> None:
    run_id = open_run(silent_s=4)

    assert "(100 %), 50 rows/s" in page_of(client, f"/runs/{run_id}")


def test_running_run_is_stopped_from_its_page(client: FlaskClient, log_in: LogIn) -> None:
    run_id = open_run()
    assert 'id="stop"' not in page_of(client, f"/runs/{run_id}")
    log_in(client)
    token = form_token(client.get(f"/runs/{run_id}"))

    answers = [
        client.post(f"/runs/{run_id}/stop", data={"form_token": token}, follow_redirects=True).get_data(as_text=True)
        for _ in range(2)
    ]

    assert f"Run {run_id} of {WORKER} ends after its current batch." in answers[0]
    assert f"Run {run_id} is already ending after its current batch, asked by {USER}." in answers[1]
    assert "stopping" in answers[1] and 'id="stop"' not in answers[1]
    assert Run.get_by_id(run_id).stopped_by == USER
    assert [(each.user, each.action, each.target) for each in logged_actions(2)] == [(USER, "stop", str(run_id))] * 2


def test_ended_run_cannot_be_stopped(client: FlaskClient, log_in: LogIn) -> None:
    run_id = open_run(outcome="done", finished_at=NOW)
    log_in(client)
    token = form_token(client.get(f"/workers/{WORKER}"))

    answer = client.post(f"/runs/{run_id}/stop", data={"form_token": token}, follow_redirects=True)

    assert "has already ended as done; nothing was stopped" in answer.get_data(as_text=True)
    assert Run.get_by_id(run_id).stopped_by is None


@pytest.fixture
def shop(settings: Settings, postgres: Database, redis_client: redis.Redis) -> FlaskClient:
    """A browser on the dashboard of an application that archives tickets."""
    create()
    fill(stale=120, kept=0)
    create_archives(tickets())
    return create_app(settings, {"tickets.closed": tickets()}, TOKEN, open_to_read=True).test_client()


def test_page_of_a_run_lists_the_rows_that_it_archived_and_how_to_restore_them(shop: FlaskClient) -> None:
    run_id = run_sweep(tickets()).run_id

    first, second = (page_of(shop, f"/runs/{run_id}{query}") for query in ("", "?skip=100"))

    assert f"<code>housekeeping restore {run_id}</code>" in first
    assert re.findall(r"120 of [^<]*<", first) == ["120 of ticket<"]
    assert first.count("<li><code>") == 100 and f"/runs/{run_id}?skip=100" in first
    assert second.count("<li><code>") == 20 and '{"id": 120}' in second and 'rel="next"' not in second


@pytest.mark.parametrize("skip", ["-1", "x", "99999999999999999999"])
def test_wrong_page_of_archived_rows_is_one_that_exists(shop: FlaskClient, skip: str) -> None:
    run_id = run_sweep(tickets()).run_id

    assert shop.get(f"/runs/{run_id}", query_string={"skip": skip}).status_code == 200


def test_restored_run_cannot_be_restored_again(shop: FlaskClient) -> None:
    run_id = run_sweep(tickets()).run_id
    assert run_id is not None
    restoration_of(tickets(), run_id).carry_out(pause=False)

    page = page_of(shop, f"/runs/{run_id}")

    assert "housekeeping restore" not in page and "no longer in the archive, or have been restored" in page


def test_missing_archive_is_unknown_and_not_empty(shop: FlaskClient, postgres: Database) -> None:
    run_id = run_sweep(tickets()).run_id
    postgres.execute_sql("ALTER TABLE old_tickets RENAME TO elsewhere")

    page = page_of(shop, f"/runs/{run_id}")

    assert "housekeeping restore" not in page and "the archive cannot be read" in page


def test_run_without_an_archive_cannot_be_undone(client: FlaskClient) -> None:
    run_id = open_run(outcome="done", finished_at=NOW)

    assert "cannot be undone: it has archived no rows" in page_of(client, f"/runs/{run_id}")


def test_resume_after_a_restore_warns_until_the_next_run(shop: FlaskClient, log_in: LogIn) -> None:
    run_id = run_sweep(tickets()).run_id
    assert run_id is not None
    restoration_of(tickets(), run_id).carry_out(pause=True)
    log_in(shop)
    token = form_token(shop.get("/workers/tickets.closed"))

    def resume() -> str:
        path, form = "/workers/tickets.closed/resume", {"form_token": token}
        return shop.post(path, data=form, follow_redirects=True).get_data(as_text=True)

    first = resume()
    run_sweep(tickets())
    switch(Override("tickets.closed", "paused"))
    second = resume()

    assert f"Warning: the next run processes 120 restored rows again if still stale, of run {run_id}." in first
    assert "Warning" not in second
