"""Search, order and problems of the workers on the first page."""

from __future__ import annotations

import re
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from flask.testing import FlaskClient

from housekeeping import Settings
from housekeeping.workers.user_status_cleanup.models import UserStatus
from tests.internals.database import Database
from tests.internals.ledger import NOW, Override, Run, switch
from tests.internals.web import create_app
from tests.internals.workers import status_sweep as sweep


@pytest.fixture
def client(settings: Settings, postgres: Database) -> FlaskClient:
    """Return a browser on a dashboard with 60 workers of four families."""
    postgres.create_tables([UserStatus])
    names = [f"{family}.job_{number:02}" for number in range(15) for family in ("mail", "carts", "ci", "audit")]
    sweeps = {name: replace(sweep, name=name) for name in names}
    return create_app(settings, sweeps, "a-token-of-the-tests", open_to_read=True).test_client()


def rows(page: str) -> list[str]:
    return re.findall(r'<tr id="worker-([^"]+)"', page)


def test_url_chooses_workers_and_the_page_says_how_many_are_hidden(client: FlaskClient) -> None:
    switch(Override("ci.job_07", "paused"))

    every, found, sorted_, both = (
        client.get(f"/?{query}").get_data(as_text=True) for query in ("", "q=carts+job_0", "sort=name", "q=job_07")
    )

    assert rows(every)[0] == "ci.job_07" and len(rows(every)) == 60 and 'id="hidden"' not in every
    assert "59 workers without a problem</summary>" in every
    assert rows(found) == [f"carts.job_{number:02}" for number in range(10)]
    assert "50 workers of 60 not found by the search." in found
    assert rows(sorted_)[0] == "audit.job_00" and "without a problem" not in sorted_
    assert rows(both)[0] == "ci.job_07" and len(rows(both)) == 4 and "without a problem" not in both


def test_pause_is_shown_with_its_reason_and_who_set_it(client: FlaskClient) -> None:
    switch(Override("ci.job_07", "paused", "a migration", said_by="kim@ops-1"))

    page = client.get("/").get_data(as_text=True)

    assert "until it is resumed: a migration (kim@ops-1)" in page


def test_worker_with_a_stuck_run_is_not_counted_as_without_a_problem(client: FlaskClient) -> None:
    begun = datetime.now(UTC) - timedelta(minutes=9)
    Run.create(worker="ci.job_07", trigger="schedule", started_at=begun, host="worker-1", pid=4711)
    Run.create(worker="ci.job_07", trigger="schedule", outcome="skipped", reason="deduplicated", finished_at=NOW)

    page = client.get("/").get_data(as_text=True)

    assert rows(page)[0] == "ci.job_07" and "59 workers without a problem</summary>" in page
    assert "then restart its process, worker-1:4711" in page


def test_headings_and_form_keep_the_other_choices(client: FlaskClient) -> None:
    page = client.get("/?q=mail&sort=last_run").get_data(as_text=True)

    assert rows(page)[0] == "mail.job_00" and 'aria-sort="descending"' in page
    assert 'href="/?q=mail&amp;sort=backlog"' in page and 'name="q" value="mail"' in page


def test_hostile_choices_are_escaped(client: FlaskClient) -> None:
    page = client.get("/", query_string={"q": "<script>alert(1)</script>", "sort": "<b>"}).get_data(as_text=True)

    assert "<script>alert" not in page and "<b>" not in page and "60 workers of 60 not found" in page
