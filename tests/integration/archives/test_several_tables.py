"""Sweep that archives two tables, one of which references the other."""

from __future__ import annotations

from datetime import timedelta
from functools import partial
from typing import Any

import pytest
from peewee import BigAutoField, ForeignKeyField

from housekeeping import BaseModel, Delete, Guard, Limits, Sweep
from housekeeping.testing.stubs import ManualClock
from tests.declarations import changed
from tests.integration.archives.tickets import NOW, Ticket, create, create_archives, fill, value
from tests.internals.database import Database, database
from tests.internals.engine import archive_sweep, restoration_of, run_sweep
from tests.internals.sweeps import TableStage

CLOCK = ManualClock(NOW)


class Reply(BaseModel):
    id = BigAutoField()
    ticket = ForeignKeyField(Ticket)


def _stale_replies(now: Any) -> Any:
    return Reply.ticket.in_(Ticket.select(Ticket.id).where(Ticket.closed_at <= now))


def _stages(
    of: Sweep, replies_kept: timedelta | None = None, tickets_kept: timedelta | None = None
) -> list[TableStage]:
    replies = Delete(archive_to="old_replies", archive_keep=replies_kept)
    tickets = Delete(archive_to="old_tickets", archive_keep=tickets_kept)
    return [
        TableStage(name="replies", stale=_stale_replies, order=(Reply.id,), action=replies, batch_size=2),
        TableStage(
            name="tickets",
            stale=lambda now: Ticket.closed_at <= now,
            order=(Ticket.closed_at, Ticket.id),
            action=tickets,
            batch_size=2,
        ),
    ]


THREADS = Sweep("tickets.threads", _stages, limits=Limits(runtime=timedelta(minutes=1)), guard=Guard(first_run=False))


@pytest.fixture
def threads(postgres: Database) -> None:
    """Seven tickets with two replies each; five of them are stale."""
    create()
    fill()
    database.execute_sql(
        "CREATE TABLE reply (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, "
        "ticket_id bigint NOT NULL REFERENCES ticket); "
        "INSERT INTO reply (ticket_id) SELECT id FROM ticket UNION ALL SELECT id FROM ticket"
    )
    create_archives(THREADS)


def test_both_tables_are_restored_the_referenced_one_first(threads: None) -> None:
    before = value("SELECT array_agg((id, ticket_id)::text ORDER BY id) FROM reply")
    run = run_sweep(THREADS, clock=CLOCK)
    assert run.run_id is not None and (run.outcome, run.counts["archived_rows"]) == ("done", 15)

    result = restoration_of(THREADS, run.run_id).carry_out(pause=True)

    assert (result.outcome, result.counts["restored"], result.counts["conflicts"]) == ("done", 15, 0)
    assert value("SELECT array_agg((id, ticket_id)::text ORDER BY id) FROM reply") == before
    assert value("SELECT (SELECT count(*) FROM old_tickets) + (SELECT count(*) FROM old_replies)") == 0


def test_dry_run_counts_both_tables(threads: None) -> None:
    run = run_sweep(THREADS, clock=CLOCK)
    assert run.run_id is not None
    database.execute_sql("INSERT INTO ticket (id, closed_at) OVERRIDING SYSTEM VALUE VALUES (2, '2026-09-01')")

    assert restoration_of(THREADS, run.run_id).dry_run().counts == {"restored": 14, "conflicts": 1}


def test_companion_deletes_from_each_archive_by_its_own_age(threads: None) -> None:
    kept = partial(_stages, replies_kept=timedelta(days=30), tickets_kept=timedelta(days=90))
    companion = archive_sweep(changed(THREADS, stages=kept, rows_per_s=1000.0, rest=0.5))
    assert companion is not None
    run_sweep(THREADS, clock=CLOCK)
    database.execute_sql(
        "UPDATE old_tickets SET archived_at = now() - (CASE WHEN id < 3 THEN 91 ELSE 60 END) * interval '1 day'; "
        "UPDATE old_replies SET archived_at = now() - (CASE WHEN id < 3 THEN 31 ELSE 20 END) * interval '1 day'"
    )

    result = run_sweep(companion)

    assert (result.outcome, result.counts["deleted_rows"]) == ("done", 4)
    assert value("SELECT min(id) FROM old_tickets") == value("SELECT min(id) FROM old_replies") == 3
    assert (companion.limits.rows_per_s, companion.limits.rest) == (1000, 0.5)
