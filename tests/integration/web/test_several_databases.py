"""Pages of workers and runs in two databases."""

from __future__ import annotations

import dataclasses
from datetime import UTC, datetime, timedelta

import pytest
import redis

from housekeeping import Settings
from tests.integration.several_databases import CI, entries
from tests.integration.several_databases import two as two
from tests.internals.core import MAIN
from tests.internals.database import connect_to, database
from tests.internals.engine import run_sweep
from tests.internals.ledger import Run, RunFilter, RunPosition, read_page, run_label
from tests.internals.web import create_app
from tests.internals.workers import configured_sweeps

pytestmark = pytest.mark.one_database_only(reason="it configures several databases itself")


def test_dashboard_shows_both_databases_and_names_the_unavailable_one(two: Settings, redis_client: redis.Redis) -> None:
    given = two.model_copy(update={"built_in": ()})
    sweeps = configured_sweeps(given, [dataclasses.replace(entries("shop.entries", CI))])
    run_sweep(sweeps["shop.entries"])
    run_sweep(sweeps["housekeeping.old_runs"])

    browser = create_app(given, sweeps, "a-token-of-the-tests", open_to_read=True).test_client()
    front, run = (browser.get(path).get_data(as_text=True) for path in ("/", "/runs/ci:1"))
    there = database.by_name()[CI]
    with database.using(CI):
        database.initialize(connect_to("postgresql://nobody@127.0.0.1:1/nothing"))
    browser = create_app(given, sweeps, "a-token-of-the-tests", open_to_read=True).test_client()
    without, page = browser.get("/").get_data(as_text=True), browser.get("/workers/housekeeping.old_runs")
    with database.using(CI):
        database.initialize(there)

    assert '<td data-label="Database">ci</td>' in front and "/runs/ci:1" in front and "Run ci:1 of" in run
    assert browser.get("/runs/no:1").status_code == 404
    assert "the database &#39;ci&#39; did not answer" in without and "PostgreSQL, database ci: " not in without
    assert 'href="/workers/housekeeping.old_runs"' in without and 'href="/workers/shop.entries"' not in without
    assert page.status_code == 200


def began(name: str, seconds: int) -> str:
    """Write a run of a database that began this many seconds after a full hour; return its label."""
    at = datetime(2026, 1, 1, tzinfo=UTC) + timedelta(seconds=seconds)
    given = {"worker": "shop.entries", "trigger": "schedule", "outcome": "done"}
    with database.using(name):
        run_id: int = Run.insert(**given, started_at=at, heartbeat_at=at, finished_at=at).execute()
    return run_label(run_id, name)


def test_pages_of_runs_go_through_both_databases_in_one_order(two: Settings) -> None:
    labels = [began(name, seconds) for seconds in (0, 1, 1, 2) for name in (MAIN, CI)]
    seen, before = list[str](), None
    for _ in range(4):
        page = read_page([CI, MAIN], lambda now: RunFilter(), limit=2, before=before)
        seen += [each.label for each in page.runs]
        before = RunPosition.of(page.runs[-1])

    assert seen == ["4", "ci:4", "3", "2", "ci:3", "ci:2", "1", "ci:1"] and set(seen) == set(labels)
    assert (page.more, page.unavailable) == (False, [])


def test_unavailable_database_hides_no_run_and_no_bar_of_the_other(two: Settings) -> None:
    began(MAIN, 0)
    with database.using(CI):
        there = database.by_name()[CI]
        database.initialize(connect_to("postgresql://nobody@127.0.0.1:1/nothing"))
    browser = create_app(two, {}, "a-token-of-the-tests", open_to_read=True).test_client()

    pages = {path: browser.get(path).get_data(as_text=True) for path in ("/runs", "/processes", "/charts")}

    with database.using(CI):
        database.initialize(there)
    assert 'href="/runs/1"' in pages["/runs"] and pages["/charts"].count("<figure") == 4
    assert all("the database &#39;ci&#39; did not answer" in page for page in pages.values())
