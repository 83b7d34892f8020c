"""Sweeps that move rows to an archive in the statement that deletes them."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import psycopg2
import pytest
import redis

from housekeeping import Call, Delete, Settings
from housekeeping.testing.assertions import assert_idempotent, assert_survives_kill
from housekeeping.testing.stubs import ManualClock
from tests.conftest import Urls
from tests.integration.archives.tickets import (
    ADDED,
    NOW,
    Ticket,
    create,
    create_archives,
    fill,
    leased,
    rows,
    sweep,
    value,
)
from tests.integration.conftest import Plant
from tests.internals.database import Database, database
from tests.internals.engine import archive_sweep, run_sweep
from tests.internals.insight import plan
from tests.internals.sweeps import Backlog
from tests.session_settings import NEEDS_SESSION

CLOCK = ManualClock(NOW)


def test_rows_move_to_the_archive_with_all_columns(archive: None) -> None:
    before = rows()

    result = run_sweep(sweep(), clock=CLOCK)

    assert (result.outcome, result.counts["deleted_rows"], result.counts["archived_rows"]) == ("done", 5, 5)
    assert rows("old_tickets") == before[:5] and rows() == before[5:]


def test_archived_rows_have_their_time_and_run(archive: None) -> None:
    result = run_sweep(sweep(), clock=CLOCK)

    assert value("SELECT array_agg(DISTINCT archived_by_run) FROM old_tickets") == [result.run_id]
    assert value("SELECT bool_and(archived_at BETWEEN now() - interval '1 minute' AND now()) FROM old_tickets")


def test_batch_is_one_statement(archive: None, statements: list[str]) -> None:
    run_sweep(sweep(), clock=CLOCK)

    changing = [sql for sql in statements if "DELETE FROM" in sql]
    assert len(changing) == 3 and all('INSERT INTO "old_tickets"' in sql for sql in changing)
    assert not any("BEGIN" in sql for sql in changing)


def test_key_that_was_archived_before_is_archived_again(archive: None) -> None:
    run_sweep(sweep(), clock=CLOCK)
    database.execute_sql("INSERT INTO ticket (id, closed_at) OVERRIDING SYSTEM VALUE VALUES (1, '2026-01-01')")

    result = run_sweep(sweep(), clock=CLOCK)

    assert result.counts["archived_rows"] == 1
    assert value("SELECT count(*) FROM old_tickets WHERE id = 1") == 2


def test_rows_of_a_call_are_archived(archive: None) -> None:
    result = run_sweep(sweep(Call(lambda row: None, then=Delete(archive_to="old_tickets"))), clock=CLOCK)

    assert (result.outcome, result.counts["archived_rows"], len(rows("old_tickets"))) == ("done", 5, 5)


def test_row_that_the_archive_rejects_stays(archive: None) -> None:
    database.execute_sql("ALTER TABLE old_tickets ADD CHECK (id <> 3)")

    result = run_sweep(sweep(), clock=CLOCK)

    assert (result.counts["archived_rows"], result.counts["failed"]) == (4, 1)
    assert value("SELECT count(*) FROM ticket WHERE id = 3") == 1


def test_missing_archive_stops_the_run(postgres: Database) -> None:
    create()
    fill()

    result = run_sweep(sweep(), clock=CLOCK)

    assert (result.outcome, len(rows())) == ("failed", 7)
    assert 'archive "old_tickets" is missing; create it: housekeeping init --with-archives' in str(result.error)


def test_column_missing_from_the_archive_stops_the_run(archive: None) -> None:
    database.execute_sql("ALTER TABLE old_tickets DROP COLUMN price")

    result = run_sweep(sweep(), clock=CLOCK)

    assert (result.outcome, len(rows()), result.counts["deleted_rows"]) == ("failed", 7, 0)
    assert 'has no column price; ALTER TABLE "old_tickets" ADD COLUMN "price" numeric(10,3)' in str(result.error)


def test_column_added_during_a_run_stops_it(archive: None, urls: Urls, settings: Settings) -> None:
    def add_column(counts: Any) -> None:
        other = psycopg2.connect(urls.database, options=f"-csearch_path={settings.namespace}")
        with other, other.cursor() as cursor:
            cursor.execute("ALTER TABLE ticket ADD COLUMN IF NOT EXISTS color text DEFAULT 'red'")
        other.close()

    result = run_sweep(sweep(), clock=CLOCK, on_batch=add_column)

    assert (result.outcome, result.counts["deleted_rows"], len(rows("old_tickets"))) == ("failed", 2, 2)
    assert "got another column during the run" in str(result.error)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ("ALTER TABLE old_tickets ALTER COLUMN price TYPE int[] USING NULL", "price"),
        ("ALTER TABLE old_tickets DROP COLUMN price", "price"),
        ("DROP TABLE old_tickets", "old_tickets"),
    ],
)
def test_archive_that_no_longer_fits_fails_the_run_and_no_row(archive: None, change: str, text: str) -> None:
    changes = iter([change])

    result = run_sweep(sweep(), clock=CLOCK, on_batch=lambda counts: database.execute_sql(next(changes, "SELECT 1")))

    assert result.outcome == "failed" and text in str(result.reason)
    assert (result.counts["deleted_rows"], result.counts.get("failed", 0), len(rows())) == (2, 0, 5)


def test_trigger_that_keeps_rows_out_of_the_archive_stops_the_run(archive: None, plant: Plant) -> None:
    plant("INSERT ON old_tickets", "true", "RETURN NULL")

    result = run_sweep(sweep(), clock=CLOCK)

    assert (result.outcome, len(rows()), len(rows("old_tickets"))) == ("failed", 7, 0)


@NEEDS_SESSION
def test_archive_sweep_is_idempotent(archive: None) -> None:
    assert_idempotent(sweep(), now=NOW)


@pytest.mark.slow
@NEEDS_SESSION
def test_killed_run_leaves_each_row_in_one_table(archive: None, housekeeping_redis: redis.Redis) -> None:
    points = assert_survives_kill(leased(), now=NOW, ignoring=ADDED)

    assert any('DELETE FROM "ticket", INSERT INTO "old_tickets"' in point for point in points)


def test_companion_deletes_archived_rows_by_age(archive: None) -> None:
    companion = archive_sweep(sweep(Delete(archive_to="old_tickets", archive_keep=timedelta(days=90))))
    assert companion is not None and companion.name == "tickets.closed.archive"
    run_sweep(sweep(), clock=CLOCK)
    database.execute_sql("UPDATE old_tickets SET archived_at = now() - interval '91 days' WHERE id <= 3")

    result = run_sweep(companion)

    assert (result.outcome, result.counts["deleted_rows"], len(rows("old_tickets"))) == ("done", 3, 2)


def test_companion_leaves_archived_rows_that_the_sweep_holds(archive: None) -> None:
    keeping = Delete(archive_to="old_tickets", archive_keep=timedelta(days=90))
    companion = archive_sweep(sweep(keeping, hold=lambda row: row.id.in_([2, 4])))
    assert companion is not None
    run_sweep(sweep(), clock=CLOCK)
    database.execute_sql("UPDATE old_tickets SET archived_at = now() - interval '91 days'")

    planned, result = plan(companion), run_sweep(companion)

    assert (planned.held, result.counts["deleted_rows"]) == (Backlog(2), 3)
    assert value("SELECT array_agg(id ORDER BY id) FROM old_tickets") == [2, 4]


def test_archive_as_a_model_is_the_same_table(archive: None) -> None:
    class OldTicket(Ticket):
        class Meta:
            table_name = "old_tickets"

    assert run_sweep(sweep(Delete(archive_to=OldTicket)), clock=CLOCK).counts["archived_rows"] == 5


def test_archive_in_a_schema_of_its_own(postgres: Database, settings: Settings) -> None:
    create()
    fill()
    name = f"{settings.namespace}_old"
    moving = sweep(Delete(archive_to=f"{name}.tickets"))
    try:
        create_archives(moving)

        assert run_sweep(moving, clock=CLOCK).counts["archived_rows"] == 5
        assert len(rows(f"{name}.tickets")) == 5
    finally:
        database.execute_sql(f"DROP SCHEMA IF EXISTS {name} CASCADE")
