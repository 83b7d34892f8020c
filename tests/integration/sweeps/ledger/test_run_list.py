"""Pages of past runs: filters, order, and the indexes that they are read by."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import pytest
from psycopg2.extensions import connection as Connection

from tests.integration.many_runs import RUNS, many_runs
from tests.integration.statements import read_rows, watch_statements
from tests.internals.core import MAIN
from tests.internals.database import Database
from tests.internals.ledger import RUNNING, Run, RunFilter, RunPosition, read_page

pytestmark = pytest.mark.one_database_only(reason="the test names runs of the only database")

END: Final = datetime(2026, 1, 8, tzinfo=UTC)
HOUR: Final = timedelta(hours=1)
DAY: Final = timedelta(days=1)
#: Rows that one scan of a page may read, of a hundred thousand: those of a worker, or of a rare trigger.
MOST_READ: Final = 2_500

TIMES: Final = ((None, None), (END - HOUR, None), (END - 4 * DAY, END - 4 * DAY + HOUR), (None, END - 3 * DAY))
FILTERS: Final = [
    RunFilter(worker, outcome, trigger, *times)
    for worker, outcome, trigger, times in itertools.product(
        (None, "shop.worker_7"),
        (None, "done", "skipped", "failed", "lost", RUNNING),
        (None, "schedule", "parent", "cli"),
        TIMES,
    )
]
POSITIONS: Final = (None, RunPosition(END - 2 * DAY, MAIN, RUNS // 2))


def ids(wanted: RunFilter, *, limit: int = 20, before: RunPosition | None = None) -> list[int]:
    return [each.run_id for each in read_page([MAIN], lambda now: wanted, limit=limit, before=before).runs]


def explained(postgres: Database, filters: Iterable[RunFilter]) -> dict[str, list[tuple[str, int]]]:
    """Return the scans of each page, the first one and one further back, by its statement."""
    sent: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        watch_statements(patch, sent.append, with_values=True)
        for wanted, before in itertools.product(filters, POSITIONS):
            ids(wanted, limit=50, before=before)
    return {
        sql: list(read_rows(postgres.execute_sql(f"EXPLAIN (ANALYZE, FORMAT JSON) {sql}").fetchone()[0][0]["Plan"]))
        for sql in sent
        if '."runs"' in sql
    }


def without_index(scans: dict[str, list[tuple[str, int]]]) -> dict[str, list[tuple[str, int]]]:
    """Return the pages that read a table without an index, or far more rows than they show."""
    return {sql: found for sql, found in scans.items() if any("Seq" in kind or n > MOST_READ for kind, n in found)}


@pytest.mark.slow
def test_every_combination_of_filters_reads_few_rows_by_an_index(postgres: Database) -> None:
    many_runs(postgres, END)

    scans = explained(postgres, FILTERS)

    assert len(scans) == len(FILTERS) * len(POSITIONS) and without_index(scans) == {}


def test_page_takes_three_statements(postgres: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[str] = []
    watch_statements(monkeypatch, sent.append)

    ids(RunFilter())

    assert len([sql for sql in sent if sql.startswith(("SELECT", "\nSELECT"))]) == 3


def test_pages_follow_each_other_without_gap_also_at_equal_times(postgres: Database) -> None:
    made = [_run(started_at=END - DAY * (number // 3)) for number in range(9)]
    order = [made[place] for place in (2, 1, 0, 5, 4, 3, 8, 7, 6)]

    seen, before = list[int](), None
    while True:
        page = read_page([MAIN], lambda now: RunFilter(), limit=2, before=before)
        seen += [each.run_id for each in page.runs]
        if not page.more:
            break
        before = RunPosition.of(page.runs[-1])

    assert seen == order


@pytest.mark.parametrize(
    ("wanted", "places"),
    [
        (RunFilter(), [3, 2, 1, 0]),
        (RunFilter(worker="b"), [2]),
        (RunFilter(outcome="failed"), [1]),
        (RunFilter(outcome=RUNNING), [3]),
        (RunFilter(trigger="cli"), [3, 1]),
        (RunFilter(trigger="cli", outcome="failed"), [1]),
        (RunFilter(since=END + 2 * HOUR), [3, 2]),
        (RunFilter(until=END + 2 * HOUR), [1, 0]),
        (RunFilter(since=END + HOUR, until=END + 2 * HOUR), [1]),
        (RunFilter(worker="b", outcome="failed"), []),
    ],
)
def test_filters_are_combined_and_include_their_start(postgres: Database, wanted: RunFilter, places: list[int]) -> None:
    made = [
        _run(),
        _run(outcome="failed", trigger="cli", started_at=END + HOUR),
        _run(worker="b", started_at=END + 2 * HOUR),
        _run(outcome=None, finished_at=None, trigger="cli", started_at=END + 3 * HOUR),
    ]

    assert ids(wanted) == [made[place] for place in places]


def test_locked_ledger_is_named_within_its_time_limit(
    postgres: Database, admin: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    _run()
    sent: list[str] = []
    watch_statements(monkeypatch, sent.append, with_values=True)
    with admin.cursor() as cursor:
        cursor.execute(f'BEGIN; LOCK TABLE "{Run._meta.schema}".runs')
        page = read_page([MAIN], lambda now: RunFilter(), limit=5)
        cursor.execute("ROLLBACK")

    assert page.runs == [] and ["lock timeout" in str(each) for each in page.unavailable] == [True]
    assert any("('statement_timeout', 2000), ('lock_timeout', 300)" in sql for sql in sent)


def _run(**columns: Any) -> int:
    given = {"worker": "a", "trigger": "schedule", "outcome": "done", "started_at": END, "heartbeat_at": END}
    run_id: int = Run.insert(**{**given, "finished_at": END, **columns}).execute()
    return run_id
