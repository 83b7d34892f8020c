from __future__ import annotations

import re
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from flask import Flask
from flask.testing import FlaskClient
from psycopg2.extensions import connection as Connection

from housekeeping import Settings
from tests.integration.conftest import AddStatuses, Beat, SetAhead
from tests.integration.sweeps.documents import DOCUMENTS
from tests.integration.sweeps.documents import documents as documents
from tests.integration.web.conftest import WORKER, LogIn, form_token, recorded
from tests.internals.database import Database
from tests.internals.engine import run_sweep
from tests.internals.ledger import NOW as DATABASE_NOW
from tests.internals.ledger import Heartbeat, Override, Rejection, switch
from tests.internals.web import ALERTS, create_app, topic
from tests.internals.workers import configured_sweeps
from tests.internals.workers import status_sweep as sweep

NOW = datetime.now(UTC)
HOSTILE = "<script>alert('x')</script>\u202e"


def test_run_is_on_the_first_page_its_workers_page_and_its_own(client: FlaskClient, admin: Connection) -> None:
    result = run_sweep(sweep)

    pages = [client.get(path).get_data(as_text=True) for path in ("/", f"/workers/{WORKER}", f"/runs/{result.run_id}")]

    assert all(f"/runs/{result.run_id}" in page for page in pages[:2]) and f"Run {result.run_id} of" in pages[2]
    assert 'aria-label="the last 1 runs, 0 of them failed;' in pages[0]


@pytest.mark.parametrize("column", ["error", "reason", "message_id"])
def test_text_from_the_database_is_escaped(client: FlaskClient, column: str) -> None:
    run_id = recorded(outcome="failed", counts={HOSTILE: 1}, **{column: HOSTILE})
    switch(Override(WORKER, "paused", HOSTILE, said_by=HOSTILE))

    pages = [client.get(path).get_data(as_text=True) for path in ("/", f"/workers/{WORKER}", f"/runs/{run_id}")]

    assert not any(bad in page for page in pages for bad in ("<script>alert", "\u202e"))
    assert "&lt;script&gt;" in pages[1] and "&lt;script&gt;" in pages[2]


@pytest.mark.parametrize("path", ["/", f"/workers/{WORKER}", f"/workers/{WORKER}/plan"])
def test_pages_show_the_clock_difference(make_app: Callable[[bool], Flask], set_ahead: SetAhead, path: str) -> None:
    before = make_app(True).test_client().get(path).get_data(as_text=True)
    set_ahead(timedelta(days=2))

    page = make_app(True).test_client().get(path).get_data(as_text=True)

    assert "check NTP" not in before
    assert 'href="/alerts#clock"' in page and " s ahead of the database; check NTP" in page


def test_ages_on_the_first_page_use_the_database_clock(client: FlaskClient, set_ahead: SetAhead) -> None:
    set_ahead(timedelta(days=2))
    run_sweep(sweep, force=True)

    page = client.get("/").get_data(as_text=True)

    assert re.search(r'<time class="ago" datetime="[^"]+">([\d.]+ s ago|just now)</time>', page) is not None
    assert "All right" not in page


def test_open_run_shows_done_of_total_rate_and_time_left(client: FlaskClient, add_statuses: AddStatuses) -> None:
    add_statuses(150, "now() - interval '1 hour'")
    began = {"started_at": DATABASE_NOW - timedelta(seconds=10), "heartbeat_at": DATABASE_NOW}
    run_id = recorded(outcome=None, finished_at=None, counts={"deleted_rows": 50}, **began)

    pages = [client.get(path).get_data(as_text=True) for path in ("/", f"/workers/{WORKER}", f"/runs/{run_id}")]

    assert all("50 of 200 rows (25 %), 5 rows/s, " in page and " left" in page for page in pages)
    assert all('value="25" max="100"' in page for page in pages)


def test_ended_run_shows_no_progress(client: FlaskClient) -> None:
    run_id = recorded(counts={"deleted_rows": 50})

    pages = [client.get(path).get_data(as_text=True) for path in ("/", f"/workers/{WORKER}", f"/runs/{run_id}")]

    assert not any("<progress" in page for page in pages)


def test_pages_show_the_held_rows(settings: Settings, documents: None) -> None:
    app = create_app(settings, {DOCUMENTS.name: DOCUMENTS}, "a-token-of-the-tests", open_to_read=True)
    client = app.test_client()

    front, worker, plan = (
        client.get(path).get_data(as_text=True)
        for path in ("/", f"/workers/{DOCUMENTS.name}", f"/workers/{DOCUMENTS.name}/plan")
    )

    assert "2 held" in front and "2 of the stale rows, by a hold" in worker
    assert '<dt>Held</dt><dd class="number">2</dd>' in plan


def test_rejected_rows_are_on_the_workers_page_and_escaped(client: FlaskClient) -> None:
    at = {"since": DATABASE_NOW, "last_at": DATABASE_NOW}
    sample = {"record": {"id": 7, "name": HOSTILE}, "error": HOSTILE}
    Rejection.create(worker=WORKER, subject="", cause=f"{HOSTILE} stays", rows=1234, times=0, sample=sample, **at)

    page = client.get(f"/workers/{WORKER}").get_data(as_text=True)

    assert "1,234 rows since" in page and "stays" in page
    assert "<script>alert" not in page


def test_failed_run_of_an_argument_is_on_the_workers_page(client: FlaskClient) -> None:
    at = {"since": DATABASE_NOW, "last_at": DATABASE_NOW}
    sample = {"record": {}, "error": "Permission denied"}
    Rejection.create(worker=WORKER, subject="7", cause="Permission denied", rows=0, times=1, sample=sample, **at)

    page = client.get(f"/workers/{WORKER}").get_data(as_text=True)

    assert "7: the run failed since" in page and "Permission denied</li>" in page


def test_failed_run_is_an_alert_on_the_first_page(client: FlaskClient) -> None:
    recorded(outcome="failed", reason="database: gone", error="gone")

    page = client.get("/").get_data(as_text=True)

    assert "the last run ended as failed: gone" in page and 'class="outcome failed"' in page


def test_alert_shows_its_remedy_and_links_to_its_help(client: FlaskClient) -> None:
    recorded(outcome="failed", reason="database: gone", error="gone", counts={"failed": 3})

    page = client.get("/").get_data(as_text=True)
    help_page = client.get("/alerts").get_data(as_text=True)

    assert 'href="/alerts#last_run">last_run</a>' in page and ALERTS["last_run"].do in page
    assert 'href="/alerts#failed_rows">failed_rows</a>' in page
    assert all(f'id="{name}"' in help_page for name in ALERTS)


def test_every_documented_alert_has_help_on_the_page() -> None:
    text = (Path(__file__).parents[3] / "docs/howto/alerts.md").read_text(encoding="utf-8")
    first_cells = [line.split("|")[1] for line in text.splitlines() if line.startswith("| `")]
    named = {topic(name) for cell in first_cells for name in re.findall(r"`([\w…]+)`", cell)}

    assert named == ALERTS.keys()


def test_run_page_lists_attempts_at_the_same_tick_or_message(client: FlaskClient) -> None:
    tick = NOW.replace(second=0, microsecond=0)
    lost = recorded(outcome="lost", reason="taken_over", tick=tick, message_id="m1")
    again = recorded(tick=tick, message_id="m1")
    by_message, by_tick = recorded(message_id="m1"), recorded(outcome="skipped", reason="deduplicated", tick=tick)
    other = recorded(tick=tick - timedelta(minutes=1), message_id="m2")

    page = client.get(f"/runs/{again}").get_data(as_text=True)
    beside = page.split('id="attempts"')[1]

    assert [f'href="/runs/{each}"' in beside for each in (lost, again, by_message, by_tick, other)] == [
        True,
        False,
        True,
        True,
        False,
    ]
    assert f"{again} (this one)" in beside
    assert 'id="beside"' not in client.get(f"/runs/{other}").get_data(as_text=True)


def test_run_of_no_declared_worker_links_to_no_worker(client: FlaskClient) -> None:
    """A purge, a restore, or a worker of an older release."""
    run_id = recorded(worker="purge:sessions")

    page = client.get(f"/runs/{run_id}").get_data(as_text=True)

    assert f"Run {run_id} of purge:<wbr>sessions" in page
    assert "/workers/purge" not in page


def test_run_page_explains_the_reason(client: FlaskClient) -> None:
    page = client.get(f"/runs/{recorded(outcome='skipped', reason='paused')}").get_data(as_text=True)

    assert f"the worker is paused: housekeeping resume {WORKER}" in page


def test_missed_and_skipped_ticks_are_listed_with_the_runs(client: FlaskClient) -> None:
    recorded(outcome="missed", reason="no_scheduler", tick=NOW, counts={"missed": 7})
    recorded(outcome="skipped", reason="lease_held", tick=NOW)

    page = client.get(f"/workers/{WORKER}").get_data(as_text=True)

    assert 'class="outcome missed">missed</span>: no_scheduler' in page and "missed 7" in page
    assert 'class="outcome skipped">skipped</span>: lease_held' in page


def test_run_that_failed_without_counts_is_not_shown_as_idle(client: FlaskClient) -> None:
    recorded(outcome="failed", reason="database: gone", message_id="m1", counts={"deleted_rows": 0})
    idle = recorded(message_id="m1", counts={"deleted_rows": 0})

    pages = [client.get(path).get_data(as_text=True) for path in (f"/workers/{WORKER}", f"/runs/{idle}")]

    assert [page.count(">nothing to do<") for page in pages] == [1, 1]


def test_chart_bars_are_not_keyboard_stops(client: FlaskClient) -> None:
    for _ in range(3):
        recorded()

    front, worker = (client.get(path).get_data(as_text=True) for path in ("/", f"/workers/{WORKER}"))

    assert front.count("<rect") == 3 and '<a href="/runs/' not in front.split("<svg")[1].split("</svg>")[0]
    assert worker.count('" tabindex="-1"><g class="bar') == 3


def test_pause_and_resume_forms_are_recorded(client: FlaskClient, log_in: LogIn) -> None:
    log_in(client)
    path = f"/workers/{WORKER}"

    word = form_token(client.get(path))
    client.post(f"{path}/pause", data={"form_token": word, "reason": "peak", "until": "2h"})
    paused = client.get(path).get_data(as_text=True)
    client.post(f"{path}/resume", data={"form_token": word})
    resumed = client.get(path).get_data(as_text=True)

    assert ": peak (dashboard@127.0.0.1)" in paused and ">Resume</button>" in paused
    assert ">Pause</button>" in resumed
    assert all(f"{each} by dashboard@127.0.0.1: " in resumed for each in ("pause", "resume"))


def test_schedule_is_shown_in_words_with_the_next_three_ticks(client: FlaskClient) -> None:
    page = client.get(f"/workers/{WORKER}").get_data(as_text=True)

    assert re.search(
        r"every minute \(\* \* \* \* \*, UTC\), next .*: \d{4}-\d\d-\d\d \d\d:\d\d(, [\d: -]+){2} UTC", page
    )


def test_unreadable_end_of_a_pause_is_rejected(client: FlaskClient, log_in: LogIn) -> None:
    log_in(client)
    word = form_token(client.get(f"/workers/{WORKER}"))

    refused = client.post(f"/workers/{WORKER}/pause", data={"form_token": word, "until": "soon"})

    assert refused.status_code == 400
    assert "is not a time; it should be such as 2h" in refused.get_data(as_text=True)


@pytest.mark.parametrize(
    "path", ["/workers/nope", "/runs/999999999", f"/runs/{10**30}", "/nothing", "/workers/%3Cscript%3E"]
)
def test_unknown_page_links_back_to_the_first_page(client: FlaskClient, path: str) -> None:
    answer = client.get(path)

    assert answer.status_code == 404
    assert 'href="/"' in answer.get_data(as_text=True) and "<script>" not in answer.get_data(as_text=True)


def test_page_reports_an_unavailable_database(client: FlaskClient, admin: Connection, settings: Settings) -> None:
    with admin.cursor() as cursor:
        cursor.execute(f"DROP SCHEMA {settings.schema_name} CASCADE")

    page = client.get("/")

    assert page.status_code == 200 and "does not exist" in page.get_data(as_text=True)
    assert client.get(f"/workers/{WORKER}").status_code == 503


def test_pages_within_two_seconds_query_the_database_once(client: FlaskClient, statements: list[str]) -> None:
    client.get("/")
    asked = len(statements)
    client.get("/")

    assert (asked > 0, len(statements)) == (True, asked)


def test_dead_process_and_its_lost_run_are_on_the_first_page(client: FlaskClient, beat: Beat) -> None:
    said = Heartbeat(kind="worker", host="<b>host", pid=7, queues=["cronjob"], threads=8, version="1", up_s=60.0)
    beat("dead", said, timedelta(hours=1))
    beat("alive", said.model_copy(update={"pid": 8, "queues": ["git_refs"], "busy": 3}))
    recorded(outcome=None, finished_at=None, heartbeat_at=DATABASE_NOW - timedelta(minutes=9))

    page = client.get("/").get_data(as_text=True)

    assert re.search(r'class="outcome lost"[^>]*>lost\? no heartbeat for 9 min<', page) is not None
    assert "1 worker alive, 3 of 8 threads busy; 0 schedulers alive; 1 process dead" in page
    assert '<span class="name">no_worker</span> no worker serves the queue &#39;cronjob&#39; since' in page


def test_front_page_shows_a_worker_that_is_not_set_up_in_one_line(settings: Settings, postgres: Database) -> None:
    app = create_app(settings, configured_sweeps(settings), "a-token-of-the-tests", open_to_read=True)

    page = app.test_client().get("/").get_data(as_text=True)

    [line] = re.findall(r"<li>Not set up: ci_stuck_builds.*</li>", page)
    assert "drop_running" in line and "table ci_builds is not in this database" in line
    assert re.findall(r'<span class="name">(\w+)</span>', page) == []  # nothing has to run yet
    assert page.count("not in this database") == 4


def test_page_of_a_worker_that_is_not_set_up_says_what_is_missing(settings: Settings, postgres: Database) -> None:
    app = create_app(settings, configured_sweeps(settings), "a-token-of-the-tests", open_to_read=True)

    page = app.test_client().get("/workers/ci.stuck_jobs").get_data(as_text=True)

    assert "not set up</span>" in page and "table ci_builds is not in this database" in page
