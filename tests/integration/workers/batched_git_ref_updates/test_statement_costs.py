"""Costs of the statements: rows are found by index, and batches take a few statements each."""

from __future__ import annotations

import re

import pytest
import redis
from psycopg2.extensions import connection as Connection

from housekeeping import Settings, enqueue_many
from housekeeping.testing.stubs import ManualClock
from housekeeping.workers.batched_git_ref_updates.models import Deletion
from tests.faults import exchanges
from tests.integration.middleware.applications import close_all, installed
from tests.integration.workers.batched_git_ref_updates.conftest import AddDeletions, Explained
from tests.internals.database import Database
from tests.internals.engine import register, run_sweep
from tests.internals.workers import (
    _unchanged,
    cleanup_scheduler,
    count_pending_projects,
    mark_processed,
    pending_projects,
    pending_rows,
    project_cleanup,
)

INDEX = "index_batched_git_ref_updates_deletions_on_project_id_pending"


def fill(admin: Connection, add_deletions: AddDeletions) -> None:
    """A table of 60,000 rows, 20,000 of them pending, 10,000 of these of one project."""
    add_deletions(40_000, project="n % 500")
    with admin.cursor() as cursor:
        cursor.execute(f"UPDATE {Deletion._meta.table_name} SET status = 2")
    add_deletions(10_000, project="7")
    add_deletions(10_000, project="n % 2000")
    with admin.cursor() as cursor:
        cursor.execute(f"ANALYZE {Deletion._meta.table_name}")


def test_projects_are_found_by_one_index_probe_each(
    add_deletions: AddDeletions, admin: Connection, explained: Explained
) -> None:
    # データベース操作仕様, パフォーマンス要件: not a DISTINCT over all rows.
    fill(admin, add_deletions)

    for find in (lambda: pending_projects(None, None, 101), lambda: pending_projects(5, 1000, 101)):
        (text,) = explained(find)
        assert INDEX in text
        assert "Seq Scan" not in text
        # 101 projects cost 101 probes, though project 7 alone has 10,000 rows.
        assert re.search(r"rows=1(\.00)? loops=100\b", text), "PostgreSQL 18 counts them as 1.00"


def test_projects_are_counted_by_a_loose_scan(
    add_deletions: AddDeletions, admin: Connection, explained: Explained
) -> None:
    fill(admin, add_deletions)

    (text,) = explained(lambda: count_pending_projects(10_001))

    assert INDEX in text and "Seq Scan" not in text
    assert count_pending_projects(10_001) == 2000
    assert count_pending_projects(100) == 100


def test_a_projects_rows_are_read_and_marked_by_index(
    add_deletions: AddDeletions,
    admin: Connection,
    clock: ManualClock,
    explained: Explained,
) -> None:
    fill(admin, add_deletions)
    rows = pending_rows(7, None, 1000)

    (first,) = explained(lambda: pending_rows(7, None, 1001))
    (later,) = explained(lambda: pending_rows(7, rows[-1][0], 1001))
    (marked,) = explained(lambda: mark_processed(7, rows))

    assert INDEX in first and INDEX in later
    assert "Rows Removed by Filter" not in first + later
    assert all("Seq Scan" not in text for text in (first, later, marked))
    assert "Rows Removed by Join Filter" not in marked


def test_marking_is_linear_before_analyze(add_deletions: AddDeletions, postgres: Database) -> None:
    add_deletions(10_000)
    rows = pending_rows(1, None, 1000)

    sql, parameters = _unchanged(1, rows).sql()
    text = "\n".join(row[0] for row in postgres.execute_sql(f"EXPLAIN {sql}", parameters))

    assert "Nested Loop" not in text


@pytest.mark.redis_broker_only(reason="it counts commands of Redis, which does not get RabbitMQ's messages")
def test_thousand_projects_cost_one_scan_one_count_and_ten_bulk_commands(
    settings: Settings,
    redis_client: redis.Redis,
    add_deletions: AddDeletions,
    statements: list[str],
) -> None:
    broker = installed(settings.model_copy(update={"database_url": None}))
    enqueue_many(register(broker, project_cleanup), [-1, -2])  # loads the script
    add_deletions(3000, project="n")

    with exchanges() as made:
        run_sweep(cleanup_scheduler)
    close_all()

    scans = [sql for sql in statements if '"further"' in sql and "COUNT(" not in sql]
    counts = [sql for sql in statements if sql.startswith("UPDATE") and '"counts" = ' in sql]
    waiting = [sql for sql in statements if '"not_before"' in sql and "ANY(" in sql]
    assert (len(scans), len(counts), len(waiting)) == (3, 3, 3)
    # Anything else might write, and is preceded by a question whether the server is there.
    assert all(sql.startswith("SELECT") for sql in scans)
    bulks = [command for command in made.commands if b"enqueue" in command]
    assert [command.count(b"EVALSHA") for command in bulks] == [1] * 30, "a hundred projects are one script"
    assert [command.count(b'"args":[') for command in bulks] == [100] * 30
