"""Page of the errors: failed runs, rejected rows and dead letters, each cause once."""

from __future__ import annotations

import re
import traceback
from datetime import timedelta
from typing import Any

import pytest
from dramatiq import Message
from dramatiq.brokers.redis import RedisBroker
from dramatiq.common import current_millis
from flask.testing import FlaskClient

from tests.integration.brokers.dead_letters.test_looking import bury
from tests.integration.web.conftest import WORKER
from tests.integration.web.test_dead_letters import HOSTILE
from tests.integration.web.test_dead_letters import broker as broker
from tests.integration.web.test_dead_letters import broker_url as broker_url
from tests.internals.ledger import NOW, Run

pytestmark = pytest.mark.one_database_only(reason="the test names runs of the only database")

HOUR = timedelta(hours=1)
#: A cause as the ledger has it for rejected rows.
REFUSED = "ConnectionError: no answer to request ..."


def wrapped(number: int) -> str:
    """Return the traceback of an error that was raised from another one."""
    try:
        try:
            raise ConnectionError(f"no answer to request {number}")
        except ConnectionError as cause:
            raise RuntimeError(f"report {number} was not sent") from cause
    except RuntimeError as error:
        return "".join(traceback.format_exception(error))


def recorded(*, ago: timedelta = timedelta(minutes=2), **columns: Any) -> int:
    times = dict.fromkeys(("started_at", "heartbeat_at", "finished_at"), NOW - ago)
    run_id: int = Run.create(**{"worker": WORKER, "trigger": "schedule", "outcome": "done", **times, **columns}).id
    return run_id


def failed(number: int, **columns: Any) -> int:
    text = f"report {number} was not sent"
    return recorded(outcome="failed", reason=text, error=text, traceback=wrapped(number), **columns)


def listed(client: FlaskClient, since: str = "24h") -> list[list[str]]:
    """Return the cause, rows, runs and dead letters of each line."""
    page = client.get("/errors", query_string={"since": since}).get_data(as_text=True)
    lines = re.findall(r'<tr><th scope="row">(.*?)</th>(.*?)</tr>', page, re.DOTALL)
    return [[cause.replace("<wbr>", ""), *re.findall(r">([^<]*)</td>", rest)[:3]] for cause, rest in lines]


def test_runs_rows_and_letters_of_one_cause_are_one_line(client: FlaskClient, broker: RedisBroker) -> None:
    failed(1)
    failed(2)
    recorded(ago=HOUR, rejected=[{"cause": REFUSED, "rows": 12, "error": "no answer to request 3", "records": []}])
    message: Message[Any] = Message("default", "charge", (), {}, {"traceback": wrapped(4)})
    bury(broker, message.encode(), died_at=current_millis() - 1000)

    assert listed(client) == [["ConnectionError: no answer to request 4", "12", "2", "1"]]


def test_different_causes_of_equal_wrappers_are_two_lines(client: FlaskClient) -> None:
    failed(1)
    recorded(outcome="failed", error="report 1 was not sent", traceback=wrapped(1).replace("no answer", "an answer"))

    assert sorted(cause for cause, *_ in listed(client)) == [
        "ConnectionError: an answer to request 1",
        "ConnectionError: no answer to request 1",
    ]


@pytest.mark.parametrize(("since", "runs"), [("1h", "1"), ("6h", "2"), ("24h", "3"), ("7d", "4")])
def test_errors_before_the_time_are_left_out(client: FlaskClient, since: str, runs: str) -> None:
    for ago in (timedelta(), 2 * HOUR, 23 * HOUR, timedelta(days=6), timedelta(days=8)):
        failed(1, ago=ago)

    assert [runs for _, _, runs, _ in listed(client, since)] == [runs]


def test_run_that_left_no_error_is_shown_by_its_reason(client: FlaskClient) -> None:
    recorded(outcome="lost", reason="taken_over")
    recorded(outcome="skipped", reason="paused")

    assert listed(client) == [["no heartbeat: the process died or hung", "", "1", ""]]


def test_page_is_one_statement_for_all_readers(client: FlaskClient, statements: list[str]) -> None:
    failed(1)
    del statements[:]

    for _ in range(5):
        listed(client)

    assert len([sql for sql in statements if "troubled" in sql]) == 1


def test_unknown_time_is_an_error_and_text_is_escaped(client: FlaskClient, broker: RedisBroker) -> None:
    recorded(outcome="failed", error=f"password=hunter2 {HOSTILE}", worker=HOSTILE)

    answer = client.get("/errors", query_string={"since": HOSTILE})

    page = answer.get_data(as_text=True)
    assert answer.status_code == 400 and "&lt;script&gt;" in page
    assert not any(bad in page for bad in ("<script>alert", "\u202e", "hunter2"))
