"""Restoring of the rows that a run has archived."""

from __future__ import annotations

from typing import Any

import pytest
import redis

from housekeeping.testing.stubs import ManualClock
from tests.integration.archives import tickets
from tests.integration.archives.tickets import NOW, leased, rows, sweep, value
from tests.integration.conftest import Plant
from tests.internals.core import WrongArgument, shared_redis
from tests.internals.database import Database, database
from tests.internals.engine import RunResult, restoration_of, run_sweep
from tests.internals.leases import RedisLeaseStore
from tests.internals.ledger import Override, Run, operators

CLOCK = ManualClock(NOW)


def archived() -> int:
    """Archive the stale tickets and return the run's id."""
    run_id = run_sweep(sweep(), clock=CLOCK).run_id
    assert run_id is not None
    return run_id


def restore(run_id: int, where: str | None = None, *, pause: bool = True) -> RunResult:
    return restoration_of(sweep(), run_id, where).carry_out(pause=pause)


def test_run_is_restored_exactly(archive: None) -> None:
    before = rows()
    run_id = archived()

    result = restore(run_id)

    assert (result.outcome, result.counts["restored"], result.counts["conflicts"]) == ("done", 5, 0)
    assert rows() == before and rows("old_tickets") == []


def test_virtual_column_is_computed_again(archive: None, postgres_18: None) -> None:
    database.execute_sql("ALTER TABLE ticket ADD net numeric GENERATED ALWAYS AS (price / 2) VIRTUAL")
    tickets.create_archives(sweep())
    before = rows()
    run_id = archived()
    assert value("SELECT sum(net) FROM old_tickets") == value("SELECT sum(price) / 2 FROM old_tickets")

    restore(run_id)

    assert rows() == before


def test_row_whose_key_is_computed_is_restored(postgres: Database) -> None:
    database.execute_sql(
        "CREATE TABLE ticket (number bigint, id bigint GENERATED ALWAYS AS (number * 2) STORED PRIMARY KEY, "
        "closed_at timestamptz); INSERT INTO ticket (number, closed_at) VALUES (1, '2026-04-01'), (2, '2026-04-02')"
    )
    tickets.create_archives(sweep())
    before = rows()

    result = restore(archived())

    assert (result.outcome, rows(), rows("old_tickets")) == ("done", before, []), result.reason


def test_table_with_a_deferrable_constraint_is_restored(archive: None) -> None:
    database.execute_sql(
        "ALTER TABLE ticket DROP CONSTRAINT ticket_email_key, ADD UNIQUE (email) DEFERRABLE INITIALLY DEFERRED"
    )
    run_id = archived()
    database.execute_sql(
        "INSERT INTO ticket (id, closed_at, email) OVERRIDING SYSTEM VALUE "
        "VALUES (2, '2026-09-01', NULL), (99, '2026-09-01', 'user4')"
    )

    result = restore(run_id)

    counts = [result.counts[name] for name in ("restored", "conflicts", "failed")]
    assert (result.outcome, counts) == ("done", [3, 1, 1])
    assert value("SELECT array_agg(id ORDER BY id) FROM old_tickets") == [2, 4]


def test_restoring_is_a_run_in_the_ledger(archive: None) -> None:
    run_id = archived()

    result = restore(run_id)

    row = Run.get_by_id(result.run_id)
    assert (row.worker, row.outcome, row.counts["restored"]) == ("restore:tickets.closed", "done", 5)
    assert row.counts["restore"] == {"run_id": run_id, "where": None}


def test_key_that_exists_again_is_a_conflict(archive: None) -> None:
    run_id = archived()
    database.execute_sql("INSERT INTO ticket (id, closed_at) OVERRIDING SYSTEM VALUE VALUES (2, '2026-09-01')")

    result = restore(run_id)

    assert (result.outcome, result.counts["restored"], result.counts["conflicts"]) == ("done", 4, 1)
    assert value("SELECT array_agg(id) FROM old_tickets") == [2]
    assert value("SELECT closed_at < '2026-08-01' FROM ticket WHERE id = 2") is False


def test_other_unique_value_that_exists_again_is_a_conflict(archive: None) -> None:
    run_id = archived()
    database.execute_sql("INSERT INTO ticket (closed_at, email) VALUES ('2026-09-01', 'user4')")

    assert restore(run_id).counts["conflicts"] == 1


def test_second_restore_restores_nothing(archive: None) -> None:
    run_id = archived()
    restore(run_id)
    before = rows()

    result = restore(run_id)

    assert (result.outcome, result.counts["restored"], result.counts["conflicts"]) == ("done", 0, 0)
    assert rows() == before


def test_only_rows_of_the_run_are_restored(archive: None) -> None:
    first = archived()
    database.execute_sql("INSERT INTO ticket (closed_at) VALUES ('2026-01-01')")
    archived()

    assert restore(first).counts["restored"] == 5
    assert len(rows("old_tickets")) == 1


@pytest.mark.parametrize(
    "where",
    ["", "1 = 1); DROP TABLE ticket; --", "id = 1 -- x", "id = 1;", "(id = 1", "x) OR (id = 1", "no_column = 1"],
)
def test_condition_that_is_no_expression_is_rejected(archive: None, where: str) -> None:
    run_id = archived()

    with pytest.raises(WrongArgument, match="--where"):
        restore(run_id, where)
    assert len(rows("old_tickets")) == 5


def test_dry_run_counts_and_changes_nothing(archive: None) -> None:
    run_id = archived()
    database.execute_sql("INSERT INTO ticket (id, closed_at) OVERRIDING SYSTEM VALUE VALUES (2, '2026-09-01')")
    database.execute_sql(
        "INSERT INTO old_tickets (id, closed_at, archived_at, archived_by_run) VALUES (9, now(), now(), 0)"
    )
    last, before = Run.select().count(), rows()

    result = restoration_of(sweep(), run_id).dry_run()

    assert (result.counts, result.dry_run) == ({"restored": 4, "conflicts": 1}, True)
    assert (rows(), len(rows("old_tickets")), Run.select().count()) == (before, 6, last)


def test_dry_run_counts_a_key_archived_twice_once(archive: None) -> None:
    run_id = archived()
    database.execute_sql(
        "INSERT INTO old_tickets SELECT (jsonb_populate_record(t, jsonb_build_object("
        "'archived_at', t.archived_at + interval '1 s'))).* FROM old_tickets AS t WHERE id <= 2"
    )
    restoration = restoration_of(sweep(), run_id, "id <= 3")

    expected = restoration.dry_run().counts

    result = restoration.carry_out(pause=True)
    assert expected == {"restored": 3, "conflicts": 2}
    assert {name: result.counts[name] for name in expected} == expected


def test_sweep_is_paused_afterward(archive: None) -> None:
    run_id = archived()

    restore(run_id)

    override = operators.override_of("tickets.closed")
    assert override is not None and override.state == "paused" and f"restore of run {run_id};" in str(override.reason)
    assert run_sweep(sweep(), clock=CLOCK).reason == "paused"


def test_sweep_is_not_paused_if_so_asked(archive: None) -> None:
    restore(archived(), pause=False)

    assert operators.override_of("tickets.closed") is None
    assert run_sweep(sweep(), clock=CLOCK).counts["deleted_rows"] == 5


def test_override_of_the_sweep_returns_after_a_restore_that_does_not_pause(archive: None) -> None:
    run_id = archived()
    operators.switch(Override("tickets.closed", "narrow", "slowly", batch_size=1))

    restore(run_id, pause=False)

    override = operators.override_of("tickets.closed")
    assert override is not None and (override.state, override.reason, override.batch_size) == ("narrow", "slowly", 1)


def test_sweep_without_a_lease_is_paused_meanwhile(archive: None) -> None:
    run_id = archived()
    seen: list[Any] = []

    restoration_of(sweep(), run_id).carry_out(
        pause=False, on_batch=lambda counts: seen.append(run_sweep(sweep(), clock=CLOCK).reason)
    )

    assert set(seen) == {"paused"} and len(rows()) == 7


def test_lease_of_the_sweep_is_held_during_a_restore(archive: None, housekeeping_redis: redis.Redis) -> None:
    run_id = run_sweep(leased(), clock=CLOCK).run_id
    assert run_id is not None
    store = RedisLeaseStore(shared_redis.get(), shared_redis.namespace)
    owners: list[str | None] = []

    restoration_of(leased(), run_id).carry_out(
        pause=False, on_batch=lambda counts: owners.append(store.owner("tickets.closed"))
    )

    assert len(owners) == 3 and all("restore:tickets.closed" in str(owner) for owner in owners)
    assert store.owner("tickets.closed") is None


def test_row_that_cannot_leave_the_archive_is_not_copied(archive: None, plant: Plant) -> None:
    run_id = archived()
    plant("DELETE ON old_tickets", "true", "RETURN NULL")

    result = restore(run_id)

    assert (result.counts["restored"], len(rows()), len(rows("old_tickets"))) == (0, 2, 5)


def test_row_that_a_trigger_changes_on_its_way_back_fails_alone(archive: None, plant: Plant) -> None:
    run_id = archived()
    spoil = "NEW.closed_at := '2030-01-01'; IF NEW.id = 3 THEN NEW.tags := NULL; END IF"
    plant("INSERT ON ticket", "true", spoil)

    result = restore(run_id)

    assert (result.counts["restored"], result.counts["conflicts"], result.counts["failed"]) == (4, 0, 1)
    assert value("SELECT array_agg(tags::text) FROM old_tickets") == ["{a,3}"]


def test_column_added_since_gets_its_default(archive: None) -> None:
    run_id = archived()
    database.execute_sql("ALTER TABLE ticket ADD COLUMN color text NOT NULL DEFAULT 'red'")
    database.execute_sql("ALTER TABLE old_tickets ADD COLUMN color text")

    assert restore(run_id).counts["restored"] == 5
    assert value("SELECT array_agg(DISTINCT color) FROM ticket") == ["red"]


def test_column_dropped_since_is_named(archive: None) -> None:
    run_id = archived()
    database.execute_sql("ALTER TABLE ticket DROP COLUMN tags")

    assert [table.lost_columns for table in restoration_of(sweep(), run_id).tables] == [("tags",)]


@pytest.mark.parametrize("batch_size", [1, 10])
def test_newest_row_of_a_key_that_one_run_archived_twice_is_restored(archive: None, batch_size: int) -> None:
    run_id = archived()
    database.execute_sql(
        "INSERT INTO old_tickets (id, closed_at, email, archived_at, archived_by_run) "
        "SELECT id, closed_at, 'newest', archived_at + interval '1 second', archived_by_run FROM old_tickets "
        "WHERE id = 5"
    )

    result = restoration_of(sweep(batch=batch_size), run_id).carry_out(pause=True)

    assert (result.outcome, result.counts["restored"], result.counts["conflicts"]) == ("done", 5, 1)
    assert value("SELECT email FROM ticket WHERE id = 5") == "newest"
    assert value("SELECT count(*) FROM old_tickets") == 1


def test_rows_that_reference_rows_of_their_table_are_restored_after_those(archive: None) -> None:
    database.execute_sql("ALTER TABLE ticket ADD parent_id bigint REFERENCES ticket")
    database.execute_sql("ALTER TABLE old_tickets ADD parent_id bigint")
    database.execute_sql("UPDATE ticket SET parent_id = id + 1 WHERE id < 5")
    before = rows()

    result = restore(archived())

    assert (result.outcome, result.counts["restored"], rows()) == ("done", 5, before)


@pytest.mark.parametrize("before", [None, Override("tickets.closed", "narrow", batch_size=1)], ids=["none", "narrow"])
def test_pause_by_an_operator_during_a_restore_stays(archive: None, before: Override | None) -> None:
    run_id = archived()
    if before is not None:
        operators.switch(before)

    def pause(counts: Any) -> None:
        operators.switch(Override("tickets.closed", "paused", "an incident"))

    result = restoration_of(sweep(), run_id).carry_out(pause=False, on_batch=pause)

    left = operators.override_of("tickets.closed")
    assert (result.outcome, left and (left.state, left.reason)) == ("done", ("paused", "an incident"))


def test_restore_passes_many_rows_that_cannot_come_back(postgres: Database, plant: Plant) -> None:
    # It begins with the newest rows, which are the bad ones.
    tickets.create()
    tickets.fill(stale=100)
    tickets.create_archives(sweep())
    run_id = archived()
    plant("INSERT ON ticket", "NEW.id > 40", "RAISE EXCEPTION 'not this one'")

    result = restore(run_id)

    assert (result.outcome, result.counts["restored"], result.counts["failed"]) == ("done", 40, 60)
    assert value("SELECT min(id) FROM old_tickets") == 41
