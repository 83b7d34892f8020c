"""Charts of the runs: values, axes, the address, and what they read."""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from flask.testing import FlaskClient

from tests.integration.many_runs import many_runs
from tests.integration.statements import watch_statements
from tests.integration.web.conftest import WORKER
from tests.internals.core import MAIN
from tests.internals.database import Database
from tests.internals.insight import trends
from tests.internals.ledger import Run
from tests.internals.workers import status_sweep as sweep

pytestmark = pytest.mark.one_database_only(reason="the test names runs of the only database")

AT = datetime(2026, 1, 7, 12, 10, 30, tzinfo=UTC)
MINUTE = timedelta(minutes=1)


def run(at: datetime, seconds: float = 2.0, **given: Any) -> None:
    times = {"started_at": at, "heartbeat_at": at, "finished_at": at + timedelta(seconds=seconds)}
    Run.insert(**{"worker": WORKER, "trigger": "schedule", "outcome": "done", **times, **given}).execute()


def read(length: trends.Range = "hour", worker: str | None = None) -> Sequence[trends.Interval]:
    found = trends.read_trends([MAIN], [sweep], length, AT, worker)
    assert found.unavailable == []
    return found.intervals


@pytest.mark.parametrize("length", ["hour", "day", "week"])
def test_last_interval_contains_now_and_all_follow_each_other(length: trends.Range) -> None:
    found = trends.intervals(length, AT)

    assert found[-1].began_at <= AT < found[-1].ended_at
    assert [each.ended_at for each in found[:-1]] == [each.began_at for each in found[1:]]


def test_runs_are_counted_in_the_interval_in_which_they_began(postgres: Database) -> None:
    run(AT, counts={"deleted_rows": 3})
    run(AT.replace(second=0), seconds=4, outcome="failed", counts={"deleted_rows": 4, "failed": 9})
    run(AT, outcome=None, finished_at=None)
    run(AT, outcome="skipped", seconds=0)
    run(AT - MINUTE, counts={"deleted_rows": 5})
    run(AT - timedelta(hours=2))
    run(AT + MINUTE)

    before, last = read()[-2:]

    assert last.outcomes == {"done": 1, "failed": 1, "running": 1, "skipped": 1}
    assert (last.rows, last.longest_s, last.mean_s) == (7, 4.0, 3.0)
    assert (before.outcomes, before.rows) == ({"done": 1}, 5)


def test_backlog_is_a_sum_and_stays_until_it_is_counted_again(postgres: Database) -> None:
    run(AT - 3 * MINUTE, backlog=100, backlog_exact=True)
    run(AT - 2 * MINUTE, backlog=7, backlog_exact=True, worker="other")
    run(AT - MINUTE, backlog=50, backlog_exact=False)

    assert [each.backlog for each in read()[-5:]] == [None, 100, 107, 57, 57]
    assert [each.backlog_exact for each in read()[-3:]] == [True, False, False]
    assert [each.backlog for each in read(worker="other")[-3:]] == [7, 7, 7]


@pytest.mark.parametrize("value", ["many", None, True, {}, []], ids=str)
def test_count_that_is_no_number_is_no_row(postgres: Database, value: Any) -> None:
    run(AT, counts={"deleted_rows": value})

    assert read()[-1].rows == 0


def test_charts_are_one_aggregate(client: FlaskClient, statements: list[str]) -> None:
    run(datetime.now(UTC))
    del statements[:]

    page = client.get("/charts?range=week").get_data(as_text=True)

    assert len([sql for sql in statements if "SELECT" in sql]) == 2 and len(page) < 120_000
    assert page.count('<g class="slot">') == 4 * 56


@pytest.mark.slow
@pytest.mark.parametrize(
    ("length", "worker"),
    [("hour", None), ("day", None), ("week", None), ("hour", "shop.worker_7"), ("week", "shop.worker_7")],
)
def test_charts_of_a_hundred_thousand_runs_are_read_by_an_index(
    postgres: Database, monkeypatch: pytest.MonkeyPatch, length: trends.Range, worker: str | None
) -> None:
    many_runs(postgres)
    sent: list[str] = []
    watch_statements(monkeypatch, sent.append, with_values=True)

    trends.read_trends([MAIN], [sweep], length, datetime.now(UTC), worker)

    [sql] = [sql for sql in sent if "GROUP BY" in sql]
    plan = "\n".join(line for (line,) in postgres.execute_sql(f"EXPLAIN {sql}"))
    assert "Seq Scan" not in plan and ("runs_started_at" in plan or "runs_worker" in plan)


def test_each_interval_has_its_values_as_text(client: FlaskClient) -> None:
    run(datetime.now(UTC), outcome="failed", counts={"deleted_rows": 1234}, backlog=77, backlog_exact=False)

    page = client.get("/charts?range=hour").get_data(as_text=True)

    titles = re.findall(r"<title>([^<]*)</title>", page)
    assert sum(each.endswith(": 1 failed") for each in titles) == 1
    assert sum(each.endswith(": 1,234") for each in titles) == 1
    assert sum(each.endswith(": mean 2 s, longest 2 s") for each in titles) == 1
    assert any(each.endswith(": at least 77") for each in titles)
    assert "<details" in page and page.count('<th scope="row">') == 60


def test_range_and_worker_are_kept_in_the_address(client: FlaskClient) -> None:
    page = client.get(f"/charts?range=week&worker={WORKER}").get_data(as_text=True)

    assert "<option selected>week</option>" in page and f"<option selected>{WORKER}</option>" in page


def test_unknown_range_is_rejected(client: FlaskClient) -> None:
    answer = client.get("/charts?range=<b>year")

    assert answer.status_code == 400 and "it should be one of hour, day, week" in answer.get_data(as_text=True)


@pytest.mark.parametrize("length", ["hour", "day", "week"])
def test_charts_without_runs_have_axes(client: FlaskClient, length: str) -> None:
    page = client.get(f"/charts?range={length}").get_data(as_text=True)

    assert page.count('class="grid"') == 20 and "no runs" in page
