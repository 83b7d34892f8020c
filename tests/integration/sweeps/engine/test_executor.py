"""The engine: what holds for every batch of every sweep, shown on one."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
from psycopg2.extensions import connection as Connection

from housekeeping.core.settings import Settings
from housekeeping.database.connection import Database, database
from housekeeping.sweeps.engine.runner import run_sweep
from housekeeping.sweeps.ledger.models import Run
from housekeeping.sweeps.ledger.runs import Counts
from housekeeping.workers.user_status_cleanup.models import UserStatus
from housekeeping.workers.user_status_cleanup.worker import sweep
from tests.integration.conftest import AddStatuses
from tests.integration.statements import watch_statements
from tests.integration.sweeps.engine.executed import DUE, SMALL
from tests.session_settings import set_in_session


@pytest.fixture
def refuse_deletion_of(admin: Connection, statuses: type[UserStatus]) -> Callable[[str], None]:
    """Make the database refuse to delete the rows of a condition, as a foreign key or trigger would."""

    def refuse(condition: str) -> None:
        with admin.cursor() as cursor:
            cursor.execute(
                "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS "
                f"$$ BEGIN IF {condition} THEN RAISE EXCEPTION 'still needed'; END IF; RETURN OLD; END $$;"
                "CREATE TRIGGER refuse BEFORE DELETE ON user_statuses FOR EACH ROW EXECUTE FUNCTION refuse()"
            )

    return refuse


def test_one_poison_row_affects_no_other_row(
    add_statuses: AddStatuses, refuse_deletion_of: Callable[[str], None], reported: list[dict[str, Any]]
) -> None:
    add_statuses(10_000, DUE)
    refuse_deletion_of("OLD.user_id = 5005")

    result = run_sweep(sweep)

    assert (result.outcome, result.counts["deleted_rows"], result.counts["failed"]) == ("done", 9_999, 1)
    assert [row.user_id for row in UserStatus.select()] == [5005]
    assert [about["user_id"] for about in reported] == [5005]


def test_run_continues_behind_a_batch_of_poison_rows(
    add_statuses: AddStatuses, refuse_deletion_of: Callable[[str], None]
) -> None:
    add_statuses(35, DUE)
    refuse_deletion_of("OLD.user_id BETWEEN 11 AND 20")

    result = run_sweep(SMALL)

    assert (result.outcome, result.counts["deleted_rows"], result.counts["failed"]) == ("done", 25, 10)


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


def test_run_costs_one_statement_per_batch(
    add_statuses: AddStatuses, postgres: Database, statements: list[str]
) -> None:
    add_statuses(95, DUE)

    run_sweep(SMALL)

    batches = [sql for sql in statements if "DELETE FROM" in sql or "EXECUTE" in sql]
    assert len(batches) == 10
    # The rest does not grow with the batches: pause, lost runs, the last runs, the row, the table's key (once a
    # process), the foreign keys (in the worker's first run), the gates, the backlog.
    assert len(statements) - len(batches) <= 9


def test_deadlocked_batch_is_retried_once(
    add_statuses: AddStatuses, admin: Connection, caplog: pytest.LogCaptureFixture
) -> None:
    # F8. The first deletion ends as a deadlock's victim does; the sequence survives its rollback.
    add_statuses(25, DUE)
    with admin.cursor() as cursor:
        cursor.execute(
            "CREATE SEQUENCE tries; CREATE FUNCTION once() RETURNS trigger LANGUAGE plpgsql AS "
            "$$ BEGIN IF nextval('tries') = 1 THEN RAISE EXCEPTION 'deadlock' USING ERRCODE = '40P01'; END IF;"
            " RETURN OLD; END $$;"
            "CREATE TRIGGER once BEFORE DELETE ON user_statuses FOR EACH ROW EXECUTE FUNCTION once()"
        )

    result = run_sweep(SMALL)

    assert (result.outcome, result.reason, result.counts["deleted_rows"]) == ("done", None, 25)
    assert [record.message for record in caplog.records].count("Batch is retried") == 1


def test_repeated_deadlock_fails_the_run(add_statuses: AddStatuses, admin: Connection) -> None:
    add_statuses(25, DUE)
    with admin.cursor() as cursor:
        cursor.execute(
            "CREATE FUNCTION always() RETURNS trigger LANGUAGE plpgsql AS "
            "$$ BEGIN RAISE EXCEPTION 'deadlock' USING ERRCODE = '40P01'; END $$;"
            "CREATE TRIGGER always BEFORE DELETE ON user_statuses FOR EACH ROW EXECUTE FUNCTION always()"
        )

    result = run_sweep(SMALL)

    assert (result.outcome, result.reason) == ("failed", "database: deadlock")


def test_held_lock_fails_the_run_in_bounded_time_and_the_next_resumes(
    add_statuses: AddStatuses, admin: Connection, settings: Settings, locked: Any
) -> None:
    # F8. Another session holds the whole table; the wait is the session's lock_timeout, here shortened.
    add_statuses(25, DUE)
    set_in_session(database, "lock_timeout = '50ms'")

    with locked("LOCK TABLE user_statuses IN ACCESS EXCLUSIVE MODE"):
        held = run_sweep(SMALL)
    free = run_sweep(SMALL)

    assert (held.outcome, held.reason) == ("failed", "database: canceling statement due to lock timeout")
    assert (free.outcome, free.counts["deleted_rows"]) == ("done", 25)


def test_only_the_last_row_of_a_batch_is_written_as_a_position(
    add_statuses: AddStatuses, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As JSON, each row of a batch of 100 costs a tenth of the batch.
    add_statuses(25, DUE)
    statements: list[str] = []
    with monkeypatch.context() as noting:
        watch_statements(noting, statements.append, with_values=True)
        run_sweep(SMALL)

    batches = [sql for sql in statements if sql.startswith("WITH") and "jsonb_build_array" in sql.lower()]
    plans = [[line for (line,) in database.execute_sql(f"EXPLAIN VERBOSE {sql}")] for sql in batches]
    assert plans
    for plan in plans:
        scans = [output for node, output in pairwise(plan) if "CTE Scan on picked" in node]
        assert len(scans) > 1
        assert [output for output in scans if "jsonb" in output] == []
