"""Error reports to Sentry, by its own client and a local server."""

from __future__ import annotations

import gzip
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from housekeeping.core.telemetry import error_reporting
from housekeeping.database.connection import Database
from tests.acceptance.processes import WORKER, eventually, started
from tests.acceptance.queues import Queues
from tests.integration.metrics.pages import STATUSES


class Sentry:
    """Server that receives Sentry's envelopes."""

    def __init__(self) -> None:
        self.envelopes: list[str] = []
        envelopes = self.envelopes

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                packed = self.headers.get("Content-Encoding") == "gzip"
                envelopes.append((gzip.decompress(body) if packed else body).decode())
                self.send_response(200)
                self.end_headers()
                self.wfile.write(b"{}")

            def log_message(self, *_: object) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()
        self.dsn = f"http://key@127.0.0.1:{self._server.server_port}/1"

    def errors(self) -> list[dict[str, Any]]:
        """Return the events with an exception."""
        items = [json.loads(line) for each in self.envelopes for line in each.splitlines() if line.startswith("{")]
        return [item for item in items if "exception" in item]

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@pytest.fixture
def sentry() -> Iterator[Sentry]:
    server = Sentry()
    yield server
    server.close()


@pytest.mark.slow
@pytest.mark.parametrize("code", ["57014", "P0001"], ids=["run", "record"])
def test_failure_is_reported_to_sentry_once_without_a_password(
    code: str,
    environment: dict[str, str],
    queues: Queues,
    postgres: Database,
    tmp_path: Path,
    sentry: Sentry,
) -> None:
    # A canceled statement fails the run; an exception in a trigger fails the row.
    environment["HOUSEKEEPING_SENTRY_DSN"] = sentry.dsn
    postgres.execute_sql("CREATE TABLE user_statuses (user_id bigint PRIMARY KEY, clear_status_at timestamptz)")
    postgres.execute_sql("INSERT INTO user_statuses VALUES (1, now())")
    postgres.execute_sql(
        "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN "
        f"RAISE EXCEPTION 'not from postgresql://ann:hunter2@host/x' USING ERRCODE = '{code}'; END $$"
    )
    postgres.execute_sql("CREATE TRIGGER no BEFORE DELETE ON user_statuses FOR EACH ROW EXECUTE FUNCTION refuse()")

    with started([*WORKER, "housekeeping.app", "-p", "1", "-t", "1"], environment, tmp_path / "log") as worker:
        queues.put("cronjob", STATUSES)
        eventually(lambda: worker.said("Run ended"), worker)
        eventually(sentry.errors, worker)
        assert worker.terminate() == 0

    [error] = sentry.errors()  # and not again from Dramatiq's integration
    assert error["contexts"]["housekeeping"]["worker"] == STATUSES
    assert "not from" in json.dumps(error)
    assert "hunter2" not in "".join(sentry.envelopes)


def test_every_error_hook_is_called_although_one_raises(
    error_hooks: list[error_reporting.Hook], caplog: pytest.LogCaptureFixture
) -> None:
    reported: list[Any] = []

    def broken(error: BaseException, about: dict[str, Any]) -> None:
        raise RuntimeError("the tracker is away")

    error_hooks += [broken, lambda error, about: reported.append((error, about))]
    error = ValueError("no")

    error_reporting.report(error, worker="work")

    assert reported == [(error, {"worker": "work"})]
    assert [record.levelname for record in caplog.records] == ["ERROR"]
