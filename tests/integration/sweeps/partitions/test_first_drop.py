"""A first run that would drop a large part of a table waits for a confirmation."""

from __future__ import annotations

import pytest

from housekeeping.testing.stubs import ManualClock
from tests.integration.sweeps.partitions.events import NOW, run, sweep, tables
from tests.internals.database import database
from tests.internals.engine import run_sweep


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


@pytest.mark.parametrize(
    ("in_ended", "in_others", "reason"), [(110_000, 300_000, "unconfirmed"), (60_000, 300_000, None)]
)
def test_partitions_are_compared_by_their_rows_and_not_by_old_statistics(
    months: None, in_ended: int, in_others: int, reason: str | None
) -> None:
    _fill(in_ended)
    database.execute_sql(
        "INSERT INTO events SELECT n, '2025-12-15', true FROM generate_series(1001, 1000 + %s) AS n", (in_others,)
    )

    assert run(sweep()).reason == reason
