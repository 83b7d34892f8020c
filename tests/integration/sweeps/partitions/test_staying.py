"""Partitions whose range is over stay if a row, a foreign key or a view needs them."""

from __future__ import annotations

import threading
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg2
import pytest
from peewee import BigIntegerField
from psycopg2.extensions import connection as Connection

from housekeeping import BaseModel, Settings
from housekeeping.testing.stubs import ManualClock
from tests.faults import at_number, at_step, instead_of_pauses
from tests.integration.conftest import Locked
from tests.integration.roles import connected_as_a_role
from tests.integration.sweeps.partitions.events import (
    NOW,
    ROWS,
    Event,
    concurrently,
    exported,
    partitions,
    recorded,
    run,
    sweep,
    tables,
)
from tests.internals.database import Database, database
from tests.internals.engine import run_sweep
from tests.internals.insight import plan
from tests.internals.sweeps import PartitionStage


def _reasons(**given: Any) -> dict[str, str | None]:
    (stage,) = plan(sweep(**given), clock=ManualClock(NOW)).as_json()["stages"]
    return {row["partition"].rpartition(".")[2]: row["stays"] for row in stage["samples"]}


@pytest.mark.parametrize("value", ["false", "NULL"])
def test_partition_with_a_row_that_is_not_stale_stays(either_way: None, value: str) -> None:
    database.execute_sql(f"UPDATE events SET exported = {value} WHERE happened_at = '2025-09-04'")

    planned = _reasons(stale=exported)
    result = run(sweep(stale=exported))

    assert planned == {"events_09": "a row does not match `stale`", "events_10": None}
    assert (result.counts["dropped_partitions"], result.counts["skipped_partitions"]) == (1, 1)
    assert "events_09" in partitions() and "events_10" not in tables()


def test_time_in_the_predicate_is_that_of_the_run(months: None) -> None:
    result = run(sweep(stale=lambda row, now: row.happened_at < now))

    assert result.counts["dropped_partitions"] == 2


_KEY = "(event_id bigint, happened_at timestamptz, FOREIGN KEY (event_id, happened_at) REFERENCES {})"


def test_partition_whose_rows_are_referenced_stays(either_way: None) -> None:
    database.execute_sql(f"CREATE TABLE mails {_KEY.format('events')}")
    database.execute_sql("INSERT INTO mails VALUES (3, '2025-10-04')")

    planned, result = _reasons(), run(sweep())

    assert planned["events_09"] is None and "rows of mails refer to it" in str(planned["events_10"])
    assert (result.counts["dropped_partitions"], result.counts["skipped_partitions"]) == (1, 1)
    assert "events_10" in partitions()


@pytest.mark.parametrize(
    ("user", "reason"),
    [
        (
            f"CREATE TABLE mails {_KEY.format('events_09')}",
            "the foreign key mails_event_id_happened_at_fkey of mails refers to it",
        ),
        ("CREATE VIEW september AS SELECT * FROM events_09", "the view september reads it"),
        (
            "CREATE FUNCTION bill(events_09) RETURNS int LANGUAGE sql AS 'SELECT 1'",
            "function bill(events_09) depends on it",
        ),
    ],
)
def test_partition_that_something_names_is_only_detached(either_way: None, user: str, reason: str) -> None:
    database.execute_sql(user)

    planned, result = _reasons(), run(sweep())
    stayed = "events_09" in partitions()
    detached = run(sweep(keep_table=True))

    assert planned == {"events_09": reason, "events_10": None}
    assert (result.counts["dropped_partitions"], result.counts["skipped_partitions"], stayed) == (1, 1, True)
    assert detached.counts["detached_partitions"] == 1


def _divide() -> None:
    """Replace the first partition by one with two partitions of its own, and a row in each."""
    database.execute_sql("DROP TABLE events_09")
    database.execute_sql(
        "CREATE TABLE events_09 PARTITION OF events FOR VALUES FROM ('2025-09-01') TO ('2025-10-01') "
        "PARTITION BY RANGE (id)"
    )
    for name, bounds in {"odd": "FROM (1) TO (2)", "even": "FROM (2) TO (3)"}.items():
        database.execute_sql(f"CREATE TABLE events_09_{name} PARTITION OF events_09 FOR VALUES {bounds}")
    database.execute_sql("INSERT INTO events VALUES (1, '2025-09-05', true), (2, '2025-09-05', false)")


def test_view_of_a_partition_below_keeps_the_partition(either_way: None) -> None:
    _divide()
    database.execute_sql("CREATE VIEW odd AS SELECT * FROM events_09_odd")

    planned, result = _reasons(), run(sweep())

    assert planned["events_09"] == "the view odd reads it"
    assert (result.counts["dropped_partitions"], result.counts["skipped_partitions"]) == (1, 1)


@concurrently
@pytest.mark.parametrize("given", [{}, {"hold": lambda row: row.exported == False}], ids=["by age", "with a hold"])  # noqa: E712
def test_partition_below_that_is_being_detached_keeps_the_partition(
    months: None, admin: Connection, locked: Locked, given: dict[str, Any]
) -> None:
    """Reads of the partition do not see its rows."""
    _divide()
    with locked("SELECT FROM events_09"), admin.cursor() as cursor:
        cursor.execute("SET lock_timeout = 300")
        with pytest.raises(psycopg2.errors.LockNotAvailable):
            cursor.execute("ALTER TABLE events_09 DETACH PARTITION events_09_even CONCURRENTLY")

    planned, result = _reasons(**given), run(sweep(**given))

    assert planned["events_09"] == "events_09_even, a partition of it, is being detached"
    assert (result.counts["dropped_partitions"], result.counts["skipped_partitions"]) == (1, 1)
    assert database.execute_sql("SELECT id FROM events_09_even").fetchall() == [(2,)]


_POLICIES = "ALTER TABLE events_09 ENABLE ROW LEVEL SECURITY, FORCE ROW LEVEL SECURITY"


@pytest.mark.parametrize(
    ("given", "statement", "reason"),
    [
        (
            {},
            "ALTER TABLE events_09 OWNER TO {owner}; GRANT ALL ON events_09 TO {role}",
            "only {owner}, its owner, can drop it",
        ),
        ({"stale": exported}, _POLICIES, "policies hide its rows from {role}"),
        ({"hold": exported}, _POLICIES, "policies hide its rows from {role}"),
    ],
    ids=["of another owner", "stale and policies", "hold and policies"],
)
def test_partition_that_its_role_cannot_drop_or_read_stays(
    postgres: Database,
    settings: Settings,
    admin: Connection,
    either_way: None,
    given: dict[str, Any],
    statement: str,
    reason: str,
) -> None:
    with connected_as_a_role(postgres, settings, admin, {}) as role, admin.cursor() as cursor:
        cursor.execute("SELECT current_user::text")
        (owner,) = cursor.fetchone() or ("",)
        for table in ("events", *tables()):
            cursor.execute(f"ALTER TABLE {table} OWNER TO {role}")
        cursor.execute(statement.format(owner=owner, role=role))
        planned, result = _reasons(**given)["events_09"], run(sweep(**given))
        stayed = "events_09" in partitions()

    assert result.outcome == "done" and result.counts["skipped_partitions"] >= 1, result.error
    assert (planned, stayed) == (reason.format(owner=owner, role=role), True)


def test_view_created_after_the_check_keeps_its_partition(either_way: None) -> None:
    """Even if the partition is detached already."""
    view = at_number(1, lambda: database.execute_sql("CREATE VIEW september AS SELECT * FROM events_09"))
    with at_step(PartitionStage, "prepare", "after", view):
        result = run(sweep())

    assert result.outcome == "done", result.error
    assert (result.counts["dropped_partitions"], result.counts["skipped_partitions"]) == (1, 1)
    assert "events_09" in partitions() and recorded() == []


def test_partition_that_stays_is_no_backlog(months: None) -> None:
    database.execute_sql("UPDATE events SET exported = false WHERE happened_at = '2025-09-04'")
    (stage,) = sweep(stale=exported).stages_for_run()

    assert (stage.backlog(NOW, 100).rows, stage.oldest(NOW)) == (1, datetime(2025, 10, 1, tzinfo=UTC))


def test_predicate_on_a_table_that_is_missing_fails_the_run(either_way: None) -> None:
    class Bill(BaseModel):
        event_id = BigIntegerField(primary_key=True)

    result = run(sweep(stale=lambda row: row.id.in_(Bill.select(Bill.event_id))))

    assert result.outcome == "failed" and '"bill" does not exist' in str(result.error)


def test_row_written_after_the_check_keeps_its_partition(either_way: None) -> None:
    """An application inserts a late row when the partition was checked, or even is detached already."""
    late = "INSERT INTO events_09 VALUES (99, '2025-09-05', false) ON CONFLICT DO NOTHING"
    with at_step(PartitionStage, "prepare", "after", lambda: database.execute_sql(late)):
        result = run(sweep(stale=exported))

    assert result.outcome == "done", result.error
    assert (result.counts["dropped_partitions"], result.counts["skipped_partitions"]) == (1, 1)
    assert "events_09" in partitions() and recorded() == []
    assert Event.select().where(Event.happened_at < datetime(2025, 10, 1, tzinfo=UTC)).count() == ROWS + 1


class HeldEvent(BaseModel):
    event_id = BigIntegerField(primary_key=True)

    class Meta:
        table_name = "held_events"


@pytest.mark.parametrize("hold", [lambda row: row.id == 99, lambda row: HeldEvent.event_id == row.id])
def test_row_on_hold_keeps_its_partition(months: None, hold: Any) -> None:
    database.execute_sql("CREATE TABLE held_events (event_id bigint PRIMARY KEY)")
    database.execute_sql("INSERT INTO held_events VALUES (99)")
    database.execute_sql("INSERT INTO events VALUES (99, '2025-10-05', true)")

    planned = _reasons(hold=hold)
    result = run(sweep(hold=hold))

    assert planned == {"events_09": None, "events_10": "a row is on hold"}
    assert (result.counts["dropped_partitions"], result.counts["skipped_partitions"]) == (1, 1)
    assert "events_10" in partitions()


@pytest.mark.slow
def test_locked_partition_is_tried_again_and_then_stays(either_way: None, locked: Locked) -> None:
    with locked("SELECT FROM events_09"):
        result = run(sweep(lock_retries=1))

    again = run(sweep())

    assert result.outcome == "done", result.error
    assert result.counts["skipped_partitions"] >= 1 and recorded() == []
    assert again.counts["dropped_partitions"] + result.counts["dropped_partitions"] == 2
    assert [name for name in tables() if name != "events_other"] == ["events_11", "events_12"]


def test_partition_that_is_free_again_is_dropped_by_a_retry(months: None, locked: Locked) -> None:
    holder = locked("SELECT FROM events_09")
    holder.__enter__()

    def release() -> None:
        nonlocal holder
        holder.__exit__(None, None, None)
        holder = locked("SELECT 1")
        holder.__enter__()

    with instead_of_pauses(release):
        result = run(sweep())
    holder.__exit__(None, None, None)

    assert (result.counts["dropped_partitions"], result.counts["skipped_partitions"]) == (2, 0)


def test_paused_run_keeps_the_partitions_that_are_left(months: None) -> None:
    """The run ends after the batch that follows the signal."""
    later, stopping = NOW + timedelta(days=31), threading.Event()  # three ranges are over
    result = run_sweep(sweep(), clock=ManualClock(later), stopping=stopping, on_batch=lambda counts: stopping.set())
    again = run(sweep(), later)

    assert (result.outcome, result.reason, result.counts["dropped_partitions"]) == ("partial", "shutdown", 2)
    assert again.counts["dropped_partitions"] == 1
