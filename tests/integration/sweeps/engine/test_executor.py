"""The engine: what holds for every batch of every sweep, shown on one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from psycopg2.extensions import connection as Connection

from tests.integration.conftest import AddStatuses, Plant
from tests.integration.sweeps.engine.executed import DUE, SMALL
from tests.internals.database import database
from tests.internals.engine import run_sweep
from tests.internals.ledger import Counts, Run

DEADLOCK = "RAISE EXCEPTION 'deadlock' USING ERRCODE = '40P01'"


def test_each_batch_is_one_transaction_with_its_counts(
    add_statuses: AddStatuses, admin: Connection, last_run: Callable[[], Run]
) -> None:
    add_statuses(25, DUE)
    seen: list[tuple[int, int]] = []

    def look(counts: Counts) -> None:
        with admin.cursor() as cursor:
            cursor.execute("SELECT 25 - count(*) FROM user_statuses")
            gone = cursor.fetchall()[0][0]
        seen.append((gone, last_run().counts["deleted_rows"]))

    run_sweep(SMALL, on_batch=look)

    assert seen == [(10, 10), (20, 20), (25, 25)]


def test_deadlocked_batch_is_retried_once(
    add_statuses: AddStatuses, plant: Plant, caplog: pytest.LogCaptureFixture
) -> None:
    # F8. The first deletion ends as a deadlock's victim does; the sequence survives its rollback.
    add_statuses(25, DUE)
    database.execute_sql("CREATE SEQUENCE tries")
    plant("DELETE ON user_statuses", "nextval('tries') = 1", DEADLOCK)

    result = run_sweep(SMALL)

    assert (result.outcome, result.reason, result.counts["deleted_rows"]) == ("done", None, 25)
    assert [record.message for record in caplog.records].count("Batch is retried") == 1


def test_repeated_deadlock_fails_the_run(add_statuses: AddStatuses, plant: Plant) -> None:
    add_statuses(25, DUE)
    plant("DELETE ON user_statuses", "true", DEADLOCK)

    result = run_sweep(SMALL)

    assert (result.outcome, result.reason) == ("failed", "database: deadlock")
