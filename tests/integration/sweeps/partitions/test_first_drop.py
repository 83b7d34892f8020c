"""A first run that would drop a large part of a table waits for a confirmation."""

from __future__ import annotations

from housekeeping.database.connection import database
from housekeeping.sweeps import run_sweep
from housekeeping.testing import ManualClock
from tests.integration.sweeps.partitions.events import NOW, run, sweep, tables


def _fill(rows: int) -> None:
    database.execute_sql(
        "INSERT INTO events SELECT n, '2025-09-15', true FROM generate_series(1001, 1000 + %s) AS n", (rows,)
    )


def test_first_run_that_drops_many_rows_waits_for_a_confirmation(months: None) -> None:
    _fill(1000)

    skipped = run(sweep())
    left = len(tables())
    confirmed = run_sweep(sweep(), clock=ManualClock(NOW), confirmed=True)

    assert (skipped.outcome, skipped.reason, left) == ("skipped", "unconfirmed", 4)
    assert confirmed.counts["dropped_partitions"] == 2


def test_first_run_that_drops_few_rows_needs_no_confirmation(months: None) -> None:
    _fill(979)  # with ten of each of two months, 999

    assert run(sweep()).counts["dropped_partitions"] == 2
