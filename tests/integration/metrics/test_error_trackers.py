"""Error reports to Sentry, by its own client and a local server."""

from __future__ import annotations

import gzip
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import pytest
import sentry_sdk
from sentry_sdk.integrations.logging import LoggingIntegration

from housekeeping.testing.stubs import ManualClock
from tests.acceptance.processes import WORKER, eventually, started
from tests.acceptance.queues import Queues
from tests.integration.metrics.pages import STATUSES
from tests.integration.sweeps.orders import Order, add, sweep
from tests.internals.core import error_reporting
from tests.internals.database import Database
from tests.internals.engine import run_sweep


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

    def events(self) -> list[dict[str, Any]]:
        """Return the events, those without an exception included."""
        items = [json.loads(line) for each in self.envelopes for line in each.splitlines() if line.startswith("{")]
        return [item for header, item in pairwise(items) if header.get("type") == "event"]

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
        eventually(sentry.events, worker)
        assert worker.terminate() == 0

    [error] = sentry.events()  # and not again from the integrations of Dramatiq and of logging
    assert error["contexts"]["housekeeping"]["worker"] == STATUSES
    assert "not from" in json.dumps(error)
    assert "hunter2" not in "".join(sentry.envelopes)


PLAIN: Final = """
import dramatiq
from housekeeping.app import broker

@dramatiq.actor(broker=broker, queue_name="plain", max_retries=0)
def fail(invoice):
    raise ValueError(f"invoice {invoice} is gone")
"""


@pytest.mark.slow
def test_each_failure_of_a_plain_actor_is_one_event(
    environment: dict[str, str], queues: Queues, tmp_path: Path, sentry: Sentry
) -> None:
    environment |= {"HOUSEKEEPING_SENTRY_DSN": sentry.dsn, "PYTHONPATH": str(tmp_path)}
    (tmp_path / "plain.py").write_text(PLAIN)

    with started([*WORKER, "housekeeping.app", "plain", "-p", "1", "-t", "1"], environment, tmp_path / "log") as worker:
        for invoice in (1, 2):
            queues.put("plain", "fail", invoice)
        eventually(lambda: len(sentry.events()) >= 2, worker)
        assert worker.terminate() == 0

    assert sorted(each["exception"]["values"][-1]["value"] for each in sentry.events()) == [
        "invoice 1 is gone",
        "invoice 2 is gone",
    ]


@pytest.mark.slow
def test_failed_runs_of_one_cause_are_one_event_an_hour(
    environment: dict[str, str], queues: Queues, postgres: Database, tmp_path: Path, sentry: Sentry
) -> None:
    environment["HOUSEKEEPING_SENTRY_DSN"] = sentry.dsn
    postgres.execute_sql("CREATE TABLE user_statuses (user_id bigint PRIMARY KEY, clear_status_at timestamptz)")
    postgres.execute_sql("INSERT INTO user_statuses VALUES (1, now())")
    postgres.execute_sql(
        "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN "
        "RAISE EXCEPTION 'not now' USING ERRCODE = '57014'; END $$"
    )
    postgres.execute_sql("CREATE TRIGGER no BEFORE DELETE ON user_statuses FOR EACH ROW EXECUTE FUNCTION refuse()")

    with started([*WORKER, "housekeeping.app", "-p", "1", "-t", "1"], environment, tmp_path / "log") as worker:
        for run in range(1, 4):
            queues.put("cronjob", STATUSES)
            eventually(lambda run=run: worker.text().count('"event": "Run ended"') == run, worker)  # type: ignore[misc]
        assert worker.terminate() == 0

    [error] = sentry.events()
    assert error["fingerprint"] == [STATUSES, error["contexts"]["housekeeping"]["cause"]]


def test_own_client_of_an_application_gets_one_event_of_a_failed_run(
    postgres: Database, clock: ManualClock, error_hooks: list[error_reporting.Hook]
) -> None:
    postgres.create_tables([Order])
    add(1)
    sent: list[Any] = []

    def before_send(event: Any, hint: Any) -> None:
        if (kept := error_reporting.drop_repeated(event, hint)) is not None:
            sent.append(kept)

    with sentry_sdk.isolation_scope() as scope:
        client = sentry_sdk.Client(
            dsn="http://key@127.0.0.1:1/1",
            before_send=before_send,
            default_integrations=False,
            integrations=[LoggingIntegration()],
        )
        scope.set_client(client)
        error_hooks.append(error_reporting.to_sentry)
        run_sweep(sweep(break_off), clock=clock)

    assert [event["contexts"]["housekeeping"]["cause"] for event in sent] == ["ConnectionResetError: reset"]


def break_off(order: Order) -> None:
    raise ConnectionResetError("reset")


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
