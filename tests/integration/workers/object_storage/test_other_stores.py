"""Azure and Google stores that confirm a deletion, do not find the object, or do not confirm anything."""

from __future__ import annotations

import base64
import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

from housekeeping.testing.stubs import ManualClock
from tests.integration.workers.object_storage.conftest import Configure, Pending, Prepare
from tests.integration.workers.object_storage.faulty_s3 import Server
from tests.internals.engine import run_sweep
from tests.internals.workers import uploads_sweep as sweep

pytestmark = pytest.mark.usefixtures("postgres", "pending")

STALE = {f"may/{number}" for number in range(12)}
UPLOADED = {f"may/{number}" for number in range(6)}
EMPTY = {
    "az": "<EnumerationResults><Blobs></Blobs></EnumerationResults>",
    "gs": "<ListBucketResult></ListBucketResult>",
}


class Store(Server):
    """Container `c` or bucket `c` whose deletions a test can break.

    Attributes:
      fault: ``no batch`` (404), ``silent`` (a batch's answer names no object), ``not found`` (404 to every deletion).
    """

    fault: str | None = None
    scheme = "az"

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Requests)
        self.objects = set(UPLOADED)

    def settings(self) -> dict[str, Any]:
        endpoint = f"http://127.0.0.1:{self.server_port}"
        if self.scheme == "az":
            key = base64.b64encode(b"0" * 32).decode()
            return {
                "url": "az://c",
                "options": {"account_name": "account", "account_key": key, "endpoint": f"{endpoint}/account"},
            }
        account = {
            "gcs_base_url": endpoint,
            "disable_oauth": True,
            "client_email": "",
            "private_key": "",
            "private_key_id": "",
        }
        options = {"service_account_key": json.dumps(account), "skip_signature": "true", "allow_http": "true"}
        return {"url": "gs://c", "options": options}

    def delete(self, key: str) -> int:
        if self.fault == "not found" or key not in self.objects:
            return 404
        self.objects.discard(key)
        return 202 if self.scheme == "az" else 204


class Requests(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Store

    def do_GET(self) -> None:
        self.say(200, EMPTY[self.server.scheme])

    def do_HEAD(self) -> None:
        self.say(200 if self.key() in self.server.objects else 404)

    def do_DELETE(self) -> None:
        self.say(self.server.delete(self.key()))

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"])).decode()
        if self.server.fault == "no batch":
            return self.say(404, "<Error><Code>ResourceNotFound</Code></Error>")
        parts = ""
        for number, path in (
            [] if self.server.fault == "silent" else re.findall(r"Content-ID: (\d+)\s+DELETE (\S+)", body)
        ):
            status = self.server.delete(unquote(path).removeprefix("/account/c/"))
            head = f"Content-Type: application/http\r\nContent-ID: {number}"
            parts += f"--b\r\n{head}\r\n\r\nHTTP/1.1 {status} Said\r\n\r\n\r\n"
        self.say(202, parts + "--b--\r\n", "multipart/mixed; boundary=b")

    def key(self) -> str:
        return unquote(urlsplit(self.path).path).removeprefix("/account").removeprefix("/c/")

    def say(self, status: int, text: str = "", kind: str = "application/xml") -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("ETag", "tag")
        self.send_header("Last-Modified", "Thu, 01 Jan 2026 00:00:00 GMT")
        if status != 204:
            self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *args: Any) -> None:
        """Log nothing."""


@pytest.fixture
def store() -> Iterator[Store]:
    with Store() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.mark.parametrize(("scheme", "fault"), [("az", None), ("az", "no batch"), ("az", "silent"), ("gs", None)])
def test_deleted_and_missing_objects_lose_their_entries(
    store: Store,
    configure: Configure,
    prepared: Prepare,
    still_pending: Pending,
    clock: ManualClock,
    scheme: str,
    fault: str | None,
) -> None:
    store.scheme, store.fault = scheme, fault
    configure(artifacts=store.settings())
    prepared(*STALE)

    result = run_sweep(sweep, clock=clock)

    assert (store.objects, still_pending()) == (set(), set())
    assert (result.counts["total_deleted_stale_entries"], result.counts["failed"]) == (len(STALE), 0)


@pytest.mark.parametrize("scheme", ["az", "gs"])
def test_store_that_finds_no_object_keeps_entries_of_existing_ones(
    store: Store, configure: Configure, prepared: Prepare, still_pending: Pending, clock: ManualClock, scheme: str
) -> None:
    store.scheme, store.fault = scheme, "not found"
    configure(artifacts=store.settings())
    prepared(*STALE)

    result = run_sweep(sweep, clock=clock)

    assert (store.objects, still_pending()) == (UPLOADED, UPLOADED)
    assert result.counts["failed"] == len(UPLOADED)
