"""Search, order, groups and problems of the workers on the first page."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from flask.testing import FlaskClient

from housekeeping.core.settings import Settings
from housekeeping.database.connection import Database
from housekeeping.sweeps.ledger.overrides import Override, switch
from housekeeping.web.application import create_app
from housekeeping.workers.user_status_cleanup.models import UserStatus
from housekeeping.workers.user_status_cleanup.worker import sweep


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

    every, found, bad, both = (
        client.get(f"/?{query}").get_data(as_text=True)
        for query in ("", "q=carts+job_0", "problems=1", "q=mail&problems=1")
    )

    assert len(rows(every)) == 60 and 'id="hidden"' not in every
    assert rows(found) == [f"carts.job_{number:02}" for number in range(10)]
    assert "10 of 60 workers shown. Hidden: 50 not found by the search." in found
    assert rows(bad) == ["ci.job_07"] and "1 of 60 workers shown. Hidden: 59 without a problem." in bad
    assert rows(both) == [] and "Hidden: 45 not found by the search, 15 without a problem." in both


def test_headings_and_form_keep_the_other_choices(client: FlaskClient) -> None:
    page = client.get("/?q=mail&group=family&sort=-name").get_data(as_text=True)

    assert rows(page)[0] == "mail.job_14" and 'aria-sort="descending"' in page
    assert 'href="/?q=mail&amp;sort=backlog&amp;group=family"' in page
    assert 'name="q" value="mail"' in page and 'name="group" value="family" checked' in page
    assert re.search(r'scope="rowgroup">mail <span class="hint">15 workers</span>', page) is not None


def test_hostile_choices_are_escaped(client: FlaskClient) -> None:
    page = client.get("/", query_string={"q": "<script>alert(1)</script>", "sort": "<b>"}).get_data(as_text=True)

    assert "<script>alert" not in page and "<b>" not in page and "0 of 60 workers shown" in page
