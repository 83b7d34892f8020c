"""Leases on the dashboard: holders and forced release."""

from __future__ import annotations

from datetime import timedelta
from urllib.parse import quote

import pytest
import redis
from flask.testing import FlaskClient

from housekeeping import ExclusiveLease
from tests.integration.web.conftest import LogIn, form_token
from tests.internals.database import database
from tests.internals.leases import LeaseRow

TTL = timedelta(minutes=10)
#: Quoted in a URL, escaped on a page, and made visible where a character would reverse the text.
HOSTILE = "a/b?c&d=\"'<script>alert(1)</script>\u202e%2e 報告"
ADDRESS = f"/leases/release?key={quote(HOSTILE, safe='')}"


@pytest.fixture
def held(client: FlaskClient, redis_client: redis.Redis) -> ExclusiveLease:
    """Hold a lease with a hostile key in this process, which has fenced a transaction with it."""
    lease = ExclusiveLease(HOSTILE, TTL, fenced=True, worker="reports")
    assert lease.try_obtain() is not None
    with database.atomic():
        lease.fence()
    return lease


def seen(page: str) -> str:
    return page.split('name="seen" value="')[1].split('"')[0]


def test_first_page_shows_the_holder_of_each_lease(client: FlaskClient, held: ExclusiveLease) -> None:
    page = client.get("/").get_data(as_text=True)

    assert "reports on " in page and 'data-label="Epoch" class="number">1</td>' in page
    assert "a/b?c&amp;d=&#34;&#39;&lt;script&gt;alert(1)&lt;/script&gt;\\u202e%2e 報告" in page
    assert "<script>alert" not in page and "\u202e" not in page


def test_lease_is_released_after_a_confirmation_page(client: FlaskClient, log_in: LogIn, held: ExclusiveLease) -> None:
    open_to_all = client.get(ADDRESS).get_data(as_text=True)
    log_in(client)

    asked = client.get(ADDRESS)
    page = asked.get_data(as_text=True)
    done = client.post(ADDRESS, data={"form_token": form_token(asked), "seen": seen(page)})

    assert ">Release</button>" not in open_to_all
    assert "can no longer commit to the database" in page and "reports on " in page
    assert (done.status_code, done.location, held.exists()) == (303, "/", False)
    assert LeaseRow.get(LeaseRow.key == HOSTILE).epoch == 2
    assert "was released." in client.get("/").get_data(as_text=True)


def test_holder_newer_than_the_page_keeps_its_lease(client: FlaskClient, log_in: LogIn, held: ExclusiveLease) -> None:
    log_in(client)
    asked = client.get(ADDRESS)
    held.cancel()
    next_one = ExclusiveLease(HOSTILE, TTL, fenced=True, worker="reports")
    next_one.try_obtain()

    refused = client.post(ADDRESS, data={"form_token": form_token(asked), "seen": seen(asked.get_data(as_text=True))})

    assert refused.status_code == 409 and next_one.exists()
    assert "the lease has a new holder since the page was loaded" in refused.get_data(as_text=True)


def test_release_of_a_free_lease_is_an_error_page(client: FlaskClient, log_in: LogIn, held: ExclusiveLease) -> None:
    log_in(client)
    word = form_token(client.get(ADDRESS))
    held.cancel()

    answers = client.get(ADDRESS), client.post(ADDRESS, data={"form_token": word})

    assert [answer.status_code for answer in answers] == [404, 404]
    assert "this lease is not held" in answers[1].get_data(as_text=True)
