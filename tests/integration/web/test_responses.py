"""Size and caching of responses."""

from __future__ import annotations

import gzip
from collections.abc import Callable
from datetime import UTC, datetime, timedelta

from flask import Flask
from flask.testing import FlaskClient

from tests.integration.web.conftest import WORKER, LogIn
from tests.internals.ledger import Run


def recorded() -> None:
    times = dict.fromkeys(("started_at", "heartbeat_at", "finished_at"), datetime.now(UTC) - timedelta(minutes=2))
    Run.create(worker=WORKER, trigger="schedule", outcome="done", **times)


def test_unchanged_page_is_not_sent_again(make_app: Callable[[bool], Flask], log_in: LogIn) -> None:
    recorded()
    client = make_app(True).test_client()
    log_in(client)
    first = client.get("/")
    client.application.extensions["snapshots"].invalidate()

    again = client.get("/", headers={"If-None-Match": first.headers["ETag"]})

    assert (again.status_code, again.get_data()) == (304, b"")
    assert sum(len(f"{name}: {value}\r\n") for name, value in again.headers) < 1000


def test_changed_page_is_sent(client: FlaskClient) -> None:
    first = client.get("/")
    recorded()
    client.application.extensions["snapshots"].invalidate()

    again = client.get("/", headers={"If-None-Match": first.headers["ETag"]})

    assert (again.status_code, b"/runs/" in again.get_data()) == (200, True)


def test_page_is_compressed_for_clients_that_accept_it(client: FlaskClient) -> None:
    plain, packed = client.get("/alerts"), client.get("/alerts", headers={"Accept-Encoding": "gzip"})
    refused = client.get("/alerts", headers={"Accept-Encoding": "gzip;q=0"})

    assert gzip.decompress(packed.get_data()) == plain.get_data() == refused.get_data()
    assert packed.headers["Content-Encoding"] == "gzip" and len(packed.get_data()) < len(plain.get_data()) / 2
    assert int(packed.headers["Content-Length"]) == len(packed.get_data())


def test_static_file_is_cached_by_its_version(client: FlaskClient) -> None:
    page = client.get("/").get_data(as_text=True)
    address = page.split('<link rel="stylesheet" href="')[1].split('"')[0]

    with client.get(address) as versioned, client.get("/static/style.css?v=other") as other:
        assert "immutable" in versioned.headers["Cache-Control"] and other.headers["Cache-Control"] == "no-store"
        assert versioned.get_data() == other.get_data()
    assert client.get("/").headers["Cache-Control"] == "no-store"
