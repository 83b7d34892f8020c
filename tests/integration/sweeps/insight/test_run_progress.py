"""Progress of open runs: done of total, rows per second, time left."""

from __future__ import annotations

from datetime import UTC, timedelta
from typing import Any

import pytest

from housekeeping import Sweep
from tests.declarations import changed
from tests.integration.conftest import AddStatuses
from tests.internals.database import database
from tests.internals.insight import Progress, ProgressReader, count_left, worker_status
from tests.internals.ledger import NOW, Run
from tests.internals.sweeps import Backlog
from tests.internals.workers import status_sweep as sweep

STALE = "now() - interval '1 hour'"


def open_run(deleted_rows: int, *, began: timedelta = timedelta(seconds=20), **given: Any) -> int:
    values = {"started_at": NOW - began, "heartbeat_at": NOW - timedelta(seconds=10)}
    counts = {"deleted_rows": deleted_rows}
    run_id: int = Run.create(worker=sweep.name, trigger="schedule", counts=counts, **{**values, **given}).id
    return run_id


def read(reader: ProgressReader, of: Sweep = sweep) -> Progress | None:
    (now,) = database.execute_sql("SELECT now()").fetchone()
    return reader.read([(of, worker_status(of, now, UTC).last_run)], now).get(of.name)


def test_open_run_has_its_rows_and_the_rate_until_its_heartbeat(add_statuses: AddStatuses) -> None:
    add_statuses(150, STALE)
    run_id = open_run(50)

    progress = read(ProgressReader())

    assert progress is not None
    assert (progress.run_id, progress.done, progress.total, progress.share) == (run_id, 50, Backlog(200), 0.25)
    assert progress.elapsed_s == pytest.approx(10, abs=0.5)
    assert progress.rows_per_s == pytest.approx(5, rel=0.1) and progress.left_s == pytest.approx(30, rel=0.1)


def test_rows_of_a_run_are_counted_once(add_statuses: AddStatuses, statements: list[str]) -> None:
    add_statuses(10, STALE)
    # Before the first run has ended, each status also reads whether rows are late.
    open_run(5, outcome="done", finished_at=NOW)
    run_id, reader = open_run(5), ProgressReader()
    read(reader)
    Run.update(counts={"deleted_rows": 12}).where(Run.id == run_id).execute()
    statements.clear()

    progress = read(reader)

    assert progress is not None and (progress.done, progress.total) == (12, Backlog(15))
    assert len([each for each in statements if "statement_timeout" in each]) == 2, (
        "the status itself: ledger and tables"
    )


@pytest.mark.parametrize(
    "given",
    [
        {"began": timedelta(seconds=4), "heartbeat_at": NOW},
        {"heartbeat_at": NOW - timedelta(minutes=2), "began": timedelta(minutes=3)},
        {"outcome": "done", "finished_at": NOW},
    ],
    ids=["just begun", "lost", "ended"],
)
def test_other_runs_have_no_progress(add_statuses: AddStatuses, given: dict[str, Any]) -> None:
    add_statuses(10, STALE)
    open_run(5, **given)

    assert read(ProgressReader()) is None


def test_total_after_a_failed_count_is_unknown(add_statuses: AddStatuses) -> None:
    add_statuses(10, STALE)

    def fails(now: object) -> Any:
        raise ValueError("unknown tenant")

    assert count_left(changed(sweep, stale=lambda row, now: fails(now))) is None


@pytest.mark.slow
def test_run_of_a_million_rows_has_a_total(add_statuses: AddStatuses) -> None:
    add_statuses(1_000_000, STALE)

    assert count_left(sweep) == Backlog(1_000_000)
