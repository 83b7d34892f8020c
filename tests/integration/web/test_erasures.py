"""Page of the erasures, and their receipts as JSON."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from flask import Flask
from flask.testing import FlaskClient
from pydantic import SecretStr

from housekeeping import Settings
from tests.integration.web.test_coverage_page import rows
from tests.internals.insight import ReceiptChanged, verified
from tests.internals.ledger import Erasure
from tests.internals.web import create_app

SECRET = SecretStr("a-secret-of-the-tests-of-erasures")
NOW = datetime.now(UTC)


@pytest.fixture
def settings(settings: Settings) -> Settings:
    return settings.model_copy(update={"erasure_key": SECRET})


def add(state: str = "done", **more: Any) -> int:
    """Add an erasure of the subject 4711, which was requested two days ago; return its ID."""
    is_open = state in ("requested", "running")
    values: dict[str, Any] = {"requested_at": NOW - timedelta(days=2), "started_at": NOW - timedelta(days=1)}
    values |= {"key": ["4711"], "found": {"email": "eve@example.com"}} if is_open else {"ended_at": NOW}
    values |= {"subject": "person", "key_hmac": "5fa7" * 16, "requester": "dpo@desk", "state": state, **more}
    return int(Erasure.create(**values).id)


def test_page_has_state_age_and_requester_of_each_erasure(client: FlaskClient) -> None:
    done, running = add(reason="ticket 12"), add("running")
    failed = add("failed", reason="ticket 13", error="the store <avatars> does not answer")

    page = client.get("/erasures").get_data(as_text=True)

    found = rows(page)
    assert found[str(done)].split()[1:4] == ["done", "person", "5fa75fa75fa7"]
    assert found[str(done)].endswith("2 d ago dpo@desk ticket 12 JSON")
    assert found[str(running)].endswith("2 d ago dpo@desk - -")
    assert "ticket 13; the store &lt;avatars&gt; does not answer" in found[str(failed)]


def test_page_and_receipt_have_nothing_that_identifies_a_subject(client: FlaskClient) -> None:
    running, done = add("running"), add()

    pages = [client.get(path).get_data(as_text=True) for path in ("/erasures", f"/erasures/{done}/receipt.json")]
    early = client.get(f"/erasures/{running}/receipt.json")

    assert early.status_code == 400
    for page in (*pages, early.get_data(as_text=True)):
        assert "4711" not in page and "eve@example.com" not in page


def test_receipt_is_signed(client: FlaskClient) -> None:
    done = add(kept={"orders": "tax law: 10 years"}, counts={"session": {"deleted": 3}})

    answer = client.get(f"/erasures/{done}/receipt.json")

    assert answer.mimetype == "application/json"
    content = verified(answer.get_data(), SECRET)
    assert (content["id"], content["kept"], content["counts"]) == (
        done,
        {"orders": "tax law: 10 years"},
        {"session": {"deleted": 3}},
    )
    with pytest.raises(ReceiptChanged):
        verified(answer.get_data().replace(b"tax law", b"tax lax"), SECRET)


def test_pages_of_the_list_and_its_filter(client: FlaskClient) -> None:
    first = add(subject="tenant")
    for _ in range(50):
        add()

    newest = client.get("/erasures").get_data(as_text=True)
    older = client.get(f"/erasures?before={first + 1}").get_data(as_text=True)
    tenants = client.get("/erasures?subject=tenant").get_data(as_text=True)

    assert str(first) not in rows(newest) and f"/erasures?before={first + 1}" in newest
    assert str(first) in rows(older) and str(first) in rows(tenants)
    assert len(rows(tenants)) == 2


def test_unknown_erasure_is_not_found_and_wrong_time_is_an_error(client: FlaskClient) -> None:
    assert client.get("/erasures/7/receipt.json").status_code == 404
    assert client.get("/erasures?since=never").status_code == 400


def test_receipt_needs_the_secret(make_app: Callable[[bool], Flask], settings: Settings) -> None:
    done = add()
    without = create_app(settings.model_copy(update={"erasure_key": None}), {}, "a-token", open_to_read=True)

    answer = without.test_client().get(f"/erasures/{done}/receipt.json")

    assert answer.status_code == 503 and "HOUSEKEEPING_ERASURE_KEY is not set" in answer.get_data(as_text=True)
