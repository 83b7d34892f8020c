"""Archives whose tables do not fit, and actions that would lose rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from housekeeping import Call, Delete, Settings, Sweep
from housekeeping.testing.stubs import ManualClock
from tests.integration.archives.tickets import NOW, Ticket, create, fill, rows, sweep
from tests.internals.database import Database, database
from tests.internals.doctor import tables
from tests.internals.engine import Finding, run_sweep
from tests.internals.insight import dry_run, plan
from tests.internals.sweeps import Batch, TableStage, Write, problems_of

CLOCK = ManualClock(NOW)


def findings(settings: Settings, of: Sweep) -> list[Finding]:
    return list(tables.examine_archives(settings, {of.name: of}))


@pytest.mark.parametrize("other", ["numeric(8,1)", "numeric(12,2)", "integer", "text", "double precision", "real[]"])
def test_type_that_would_change_values_stops_the_run(postgres: Database, other: str) -> None:
    create()
    fill()
    database.execute_sql(
        "CREATE TABLE old_tickets (LIKE ticket, archived_at timestamptz, archived_by_run bigint); "
        f"ALTER TABLE old_tickets DROP COLUMN price, ADD COLUMN price {other}"
    )

    result = run_sweep(sweep(), clock=CLOCK)

    assert (result.outcome, len(rows()), result.counts["deleted_rows"]) == ("failed", 7, 0)
    assert (
        f'archive "old_tickets" would change values: price is {other} instead of numeric(10,3); '
        'ALTER TABLE "old_tickets" ALTER COLUMN "price" TYPE numeric(10,3)'
    ) in str(result.error)


def test_type_that_holds_all_values_is_accepted(archive: None) -> None:
    database.execute_sql("ALTER TABLE old_tickets ALTER COLUMN price TYPE numeric, ALTER COLUMN id TYPE numeric")

    assert run_sweep(sweep(), clock=CLOCK).counts["archived_rows"] == 5


def test_doctor_shows_the_statement_for_a_type(archive: None, settings: Settings) -> None:
    database.execute_sql("ALTER TABLE old_tickets ALTER COLUMN price TYPE integer")

    (found,) = findings(settings, sweep())

    assert found.level == "error" and "price is integer instead of numeric(10,3)" in found.text
    assert found.way_out == 'ALTER TABLE "old_tickets" ALTER COLUMN "price" TYPE numeric(10,3)'


def test_doctor_warns_of_an_archive_without_a_key(archive: None, settings: Settings) -> None:
    assert [each.level for each in findings(settings, sweep())] == ["fine"]
    database.execute_sql("ALTER TABLE old_tickets DROP CONSTRAINT old_tickets_pkey")

    (found,) = findings(settings, sweep())

    assert found.level == "warning" and "its rows cannot be restored" in found.text
    assert found.way_out == 'ALTER TABLE "old_tickets" ADD PRIMARY KEY ("archived_by_run", "archived_at", "id")'


def test_plan_counts_the_rows_that_would_be_archived(archive: None) -> None:
    assert dry_run(sweep(), clock=CLOCK).counts["archived_rows"] == 5
    assert plan(sweep(), clock=CLOCK).stages[0][0].counts == {"deleted_rows": 5, "archived_rows": 5}


def test_plan_says_that_rows_of_a_cascade_are_not_archived(archive: None) -> None:
    database.execute_sql(
        "CREATE TABLE comment (id bigint PRIMARY KEY, ticket_id bigint REFERENCES ticket ON DELETE CASCADE, "
        "read_id bigint REFERENCES ticket ON DELETE SET NULL); CREATE INDEX ON comment (ticket_id); "
        "CREATE INDEX ON comment (read_id)"
    )

    cascade, set_null = sorted((each.text for each in plan(sweep(), clock=CLOCK).dependents), key=len)

    assert cascade.endswith("its rows are deleted as well, and not counted or archived")
    assert set_null.endswith("its rows are changed as well, and not counted; a restore does not change them back")


@pytest.mark.parametrize("is_called", [False, True])
def test_action_that_archives_no_row_is_rejected(archive: None, is_called: bool) -> None:
    class Own(Delete):
        def write(self, table: TableStage, batch: Batch, chosen: Any) -> Write:
            return Delete().write(table, batch, chosen)

        @property
        def counted_as(self) -> Sequence[str]:
            return ("deleted_rows",)

    own: Any = Own(archive_to="old_tickets")
    result = run_sweep(sweep(Call(lambda ticket: None, then=own) if is_called else own), clock=CLOCK)

    assert (result.outcome, len(rows())) == ("failed", 7)
    assert "Own has archive_to='old_tickets', but its `write` archives no row" in str(result.error)


def test_archive_of_two_tables_of_a_sweep_is_rejected(archive: None) -> None:
    class Message(Ticket):
        pass

    both = [each.declared_stages()[0] for each in (sweep(), sweep(Delete(archive_to="old_tickets")))]
    other = TableStage(
        name="messages",
        stale=lambda now: Message.closed_at <= now,
        order=(Message.closed_at, Message.id),
        action=Delete(archive_to="old_tickets"),
        batch_size=2,
    )

    assert list(problems_of(both)) == []
    (problem,) = problems_of([*both, other])
    assert str(problem) == 'archive "old_tickets" takes the rows of "ticket" and of "message"; give each one an archive'
