"""The list of the runs, and the page of one."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import timedelta

import pytest
from flask import Flask
from flask.testing import FlaskClient

from tests.integration.conftest import Beat
from tests.integration.many_runs import RUNS, many_runs
from tests.integration.web.conftest import WORKER, recorded
from tests.internals.database import Database
from tests.internals.ledger import NOW, Heartbeat

pytestmark = pytest.mark.one_database_only(reason="the test names runs of the only database")

HOUR = timedelta(hours=1)
HOSTILE = "<script>alert('x')</script>\u202e"


def listed(page: str) -> list[int]:
    return [int(each) for each in re.findall(r'<tr id="run-(\d+)">', page)]


@pytest.fixture
def read(client: FlaskClient) -> Callable[[str], str]:
    return lambda path: client.get(path).get_data(as_text=True)


@pytest.mark.slow
def test_list_leads_through_a_hundred_thousand_runs_page_by_page(postgres: Database, client: FlaskClient) -> None:
    many_runs(postgres)
    seen, path = list[int](), "/runs"
    for _ in range(3):
        page = client.get(path).get_data(as_text=True)
        seen += listed(page)
        path = re.findall(r'href="([^"]+)">Older<', page)[0].replace("&amp;", "&")

    assert seen == list(range(RUNS, RUNS - 150, -1))


@pytest.mark.parametrize(("path", "most"), [("/runs", 3), ("/runs?outcome=failed&since=2h", 3), ("/runs/{}", 9)])
def test_page_takes_few_statements(client: FlaskClient, statements: list[str], path: str, most: int) -> None:
    run_id = [recorded(message_id="m", outcome="failed") for _ in range(20)][0]
    client.get("/")  # the page of a run reads the snapshot as well
    del statements[:]

    assert client.get(path.format(run_id)).status_code == 200

    assert len([sql for sql in statements if "SELECT" in sql]) <= most, statements


@pytest.mark.parametrize(
    ("query", "places"),
    [
        (f"worker={WORKER}", [2, 1, 0]),
        ("outcome=failed", [1]),
        ("outcome=running", [3]),
        ("trigger=cli", [1]),
        ("since=90min", [3, 2]),
        ("until=90min", [1, 0]),
        ("worker=&outcome=&trigger=&since=&until=", [3, 2, 1, 0]),
        ("worker=nobody", []),
    ],
)
def test_list_is_filtered(read: Callable[[str], str], query: str, places: list[int]) -> None:
    made = [
        recorded(started_at=NOW - 3 * HOUR),
        recorded(started_at=NOW - 2 * HOUR, outcome="failed", trigger="cli"),
        recorded(started_at=NOW - HOUR),
        recorded(worker="other", started_at=NOW, outcome=None, finished_at=None),
    ]

    assert listed(read(f"/runs?{query}")) == [made[place] for place in places]


@pytest.mark.parametrize("name", ["outcome", "trigger", "since", "until"])
def test_wrong_filter_is_an_error_at_its_field_and_stays_typed(client: FlaskClient, name: str) -> None:
    recorded()

    answer = client.get("/runs", query_string={name: f"nonsense{HOSTILE}", "worker": "typed"})

    page = answer.get_data(as_text=True)
    assert answer.status_code == 400 and f'aria-describedby="wrong-{name}"' in page and 'value="typed"' in page
    assert f'<span class="wrong" id="wrong-{name}">' in page and listed(page) == []
    assert "<script>alert" not in page and "\u202e" not in page


@pytest.mark.parametrize("before", ["x", "gone:1", "0", f"{2**64}", ""])
def test_position_that_cannot_be_read_is_not_found(client: FlaskClient, before: str) -> None:
    assert client.get("/runs", query_string={"before": before}).status_code == 404


def test_page_of_a_failed_run_has_process_traceback_and_rejected_records(read: Callable[[str], str]) -> None:
    group = {"cause": "odd", "rows": 1234, "error": f"odd {HOSTILE}", "records": [{"id": 7, "note": HOSTILE}]}
    run_id = recorded(
        outcome="failed",
        error="disk full",
        reason="disk full",
        host=f"h{HOSTILE}",
        pid=4711,
        message_id="m",
        traceback=f"Traceback\n  {HOSTILE}",
        rejected=[group],
        counts={"failed": 1234, "out_of_time": False},
    )
    retry = recorded(message_id="m")

    page = read(f"/runs/{run_id}")

    assert "pid 4711" in page and "<strong>1,234 records</strong> odd &lt;script" in page and "1,233 more" in page
    assert re.search(r"<pre[^>]*>Traceback\n  &lt;script", page) is not None
    assert f'href="/runs/{retry}"' in page and "the next attempt at its message is run" in page
    assert "<dt>out_of_time</dt>" not in page
    assert "<script>alert" not in page and "\u202e" not in page


def test_dead_run_is_lost_in_the_list_and_on_its_page(read: Callable[[str], str]) -> None:
    silent = {"outcome": None, "finished_at": None, "heartbeat_at": NOW - timedelta(minutes=9)}
    run_id = recorded(**silent)

    pages = [read(path) for path in ("/", "/runs", f"/runs/{run_id}", f"/workers/{WORKER}", "/processes")]

    assert all("lost? no heartbeat for 9 min" in page for page in pages)
    assert "its process was killed or hangs" in pages[2] and "<progress" not in pages[2]


def test_open_run_that_is_not_the_last_shows_its_rate(read: Callable[[str], str]) -> None:
    began = {"started_at": NOW - timedelta(seconds=10), "heartbeat_at": NOW}
    run_id = recorded(outcome=None, finished_at=None, counts={"deleted_rows": 50}, **began)
    recorded()

    assert "50 rows, 5 rows/s" in read(f"/runs/{run_id}")


def test_number_beyond_any_id_is_not_found(make_app: Callable[[bool], Flask]) -> None:
    assert make_app(True).test_client().get(f"/runs/{2**64}").status_code == 404


@pytest.mark.parametrize("path", ["/", "/runs", f"/workers/{WORKER}"])
def test_lists_read_no_traceback_and_no_rejected_records(client: FlaskClient, statements: list[str], path: str) -> None:
    recorded(outcome="failed", traceback="Traceback")
    del statements[:]

    client.get(path)

    assert any('"runs"' in sql for sql in statements)
    assert not any(name in sql for sql in statements for name in ('"traceback"', '"rejected"'))


@pytest.mark.parametrize("path", ["/runs", "/runs?outcome=done", "/processes"])
def test_poll_of_an_unchanged_page_has_no_body(client: FlaskClient, path: str, beat: Beat) -> None:
    recorded()
    beat("one", Heartbeat(kind="worker", host="app", pid=7, threads=8, version="1", up_s=60.0))
    first = client.get(path)

    again = client.get(path, headers={"If-None-Match": first.headers["ETag"]})

    assert (again.status_code, again.data) == (304, b"")
