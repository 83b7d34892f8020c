"""Archive of all tables of a cascade, and the restore that brings everything back."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

import pytest

from housekeeping import DeclarationError, Delete, Guard, Limits, Reference, Rows, Sweep, testing
from housekeeping.testing.stubs import ManualClock
from tests.declarations import only
from tests.integration.archives.tickets import create_archives
from tests.integration.cascades.shop import NOW, execute, ids, sweep, value
from tests.integration.conftest import Plant
from tests.internals.database import database
from tests.internals.engine import restoration_of, run_sweep
from tests.session_settings import NEEDS_SESSION

CLOCK = ManualClock(NOW)
DECISIONS = {"reply": "delete", "comment.editor_id": "clear", "account.main_order": "clear"}


def _archiving(dependents: Any = DECISIONS, schema: str = "old_rows", **options: Any) -> Sweep:
    declared = sweep(**options)
    action = Delete(dependents=dependents, archive_to=schema)
    return replace(declared, stages=replace(only(declared), action=action))


@pytest.fixture
def threads(accounts: None) -> None:
    """Accounts with a main order, and comments with an editor and with trees of replies."""
    execute(
        "ALTER TABLE account ADD main_order bigint REFERENCES orders; CREATE INDEX ON account (main_order);"
        "ALTER TABLE comment ADD editor_id bigint DEFAULT 4 REFERENCES account, ADD text text[];"
        "CREATE INDEX ON comment (editor_id);"
        "UPDATE account SET main_order = id * 2; UPDATE comment SET editor_id = 1 + id % 4, text = '{a,NULL}';"
        "CREATE TABLE reply (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, account_id bigint NOT NULL"
        " REFERENCES account ON DELETE CASCADE, reply_id bigint REFERENCES reply, twice bigint GENERATED ALWAYS AS"
        " (account_id * 2) STORED);"
        "CREATE INDEX ON reply (account_id); CREATE INDEX ON reply (reply_id);"
        "INSERT INTO reply (account_id, reply_id) SELECT 1 + n % 4, CASE WHEN n > 4 THEN (n + 1) / 2 END"
        " FROM generate_series(1, 40) AS n"
    )


def contents() -> dict[str, list[str]]:
    """Return all rows of all tables, as texts."""
    tables = ("account", "orders", "item", "comment", "reply")
    query = "SELECT row_to_json(t)::text FROM {} AS t ORDER BY 1"
    return {each: [row for (row,) in database.execute_sql(query.format(each))] for each in tables}


@pytest.fixture
def schema(threads: None, archive: str) -> str:
    return archive


@pytest.mark.parametrize("batch", [1, 2, 3, 50])
def test_restore_brings_everything_back(schema: str, batch: int) -> None:
    before = contents()
    of = _archiving(schema=schema, batch=batch)
    create_archives(of)
    run = run_sweep(of, clock=CLOCK)
    counts = run.counts
    assert run.run_id is not None and run.outcome == "done" and ids("account") == {"account": [4]}
    assert counts["archived_rows"] == sum(
        counts[each] for each in ("deleted_rows", "deleted_dependents", "cleared_dependents")
    )
    assert contents() != before

    result = restoration_of(of, run.run_id).carry_out(pause=True)

    assert (result.outcome, result.counts.get("failed", 0), result.counts["conflicts"]) == ("done", 0, 0)
    assert result.counts["restored"] == counts["archived_rows"]
    assert contents() == before
    for table in before:
        assert value(f'SELECT count(*) FROM "{schema}".{table}') == 0


def test_cleared_column_with_a_new_value_stays_as_it_is(schema: str) -> None:
    of = _archiving(schema=schema)
    create_archives(of)
    run = run_sweep(of, clock=CLOCK)
    assert run.run_id is not None
    execute("UPDATE comment SET author_id = 4 WHERE id = 2")

    dry = restoration_of(of, run.run_id).dry_run()
    result = restoration_of(of, run.run_id).carry_out(pause=True)

    assert dry.counts["restored"] == run.counts["archived_rows"]
    assert result.counts["conflicts"] == 1
    assert value("SELECT author_id FROM comment WHERE id = 2") == 4


def test_column_that_a_trigger_restores_is_not_archived(archive: str, plant: Plant) -> None:
    of = _archiving(True, schema=archive)
    create_archives(of)
    plant("UPDATE ON comment", "OLD.author_id = 2", "NEW.author_id = 2")

    result = run_sweep(of, clock=CLOCK)

    assert (result.outcome, result.counts["failed"], ids("account")) == ("done", 1, {"account": [2, 4]})
    assert ids(f'"{archive}".comment') == {f'"{archive}".comment': [1, 3]}
    assert result.counts["archived_rows"] == 2 + 18 + 2


def test_run_without_its_archives_changes_nothing(schema: str) -> None:
    before = contents()

    result = run_sweep(_archiving(schema=schema), clock=CLOCK)

    assert result.outcome == "failed" and "archive" in str(result.reason)
    assert contents() == before


@pytest.mark.parametrize("batch", [1, 3, 50])
@pytest.mark.parametrize("main_order", ["id * 2", "1 + id % 3 * 2"], ids=["own", "of the next account"])
def test_restore_brings_a_circle_of_tables_back(schema: str, batch: int, main_order: str) -> None:
    """Orders depend on accounts, which depend on their main order."""
    execute(f"UPDATE account SET main_order = {main_order} WHERE id < 4")
    before = contents()
    of = _archiving({**DECISIONS, "account.main_order": "delete"}, schema=schema, batch=batch)
    create_archives(of)
    run = run_sweep(of, clock=CLOCK)
    assert run.run_id is not None and run.outcome == "done" and ids("account") == {"account": [4]}

    result = restoration_of(of, run.run_id).carry_out(pause=True)

    assert (result.outcome, result.counts.get("failed", 0), result.counts["conflicts"]) == ("done", 0, 0)
    assert (result.counts["restored"], result.counts["relinked"]) == (run.counts["archived_rows"], 3)
    assert contents() == before
    for table in before:
        assert value(f'SELECT count(*) FROM "{schema}".{table}') == 0


#: Rows that refer to others of their table: two circles of five, a tree that depends on one of them, and a row alone.
_NODES: Final = (
    "CREATE TABLE node (id bigint PRIMARY KEY, node_id bigint {null} REFERENCES node, old boolean NOT NULL);"
    "CREATE INDEX ON node (node_id);"
    "INSERT INTO node SELECT n, (n - 1) / 5 * 5 + n % 5 + 1, true FROM generate_series(1, 10) AS n;"
    "INSERT INTO node VALUES (11, 3, true), (12, 11, true), (13, 11, true), (14, 14, true), (15, 15, false)"
)


def _old_nodes(schema: str, batch: int, null: str) -> Sweep:
    execute(_NODES.format(null=null))
    rows = Rows("node", stale=lambda row: row.old, action=Delete(dependents={"node": "delete"}, archive_to=schema))
    of = Sweep("shop.nodes", rows, limits=Limits(batch=batch, batch_takes=None), guard=Guard(first_run=False))
    create_archives(of)
    return of


def _nodes(table: str = "node") -> list[tuple[int, int]]:
    return list(database.execute_sql(f"SELECT id, node_id FROM {table} ORDER BY id"))


@pytest.mark.parametrize("batch", [1, 2, 4, 50])
@pytest.mark.parametrize("null", ["NULL", "NOT NULL"])
def test_restore_brings_circles_of_rows_back(archive: str, batch: int, null: str) -> None:
    of = _old_nodes(archive, batch, null)
    before = _nodes()
    run = run_sweep(of, clock=CLOCK)
    assert run.run_id is not None and _nodes() == [(15, 15)]

    result = restoration_of(of, run.run_id).carry_out(pause=True)

    assert (result.outcome, result.counts.get("failed", 0), result.counts["conflicts"]) == ("done", 0, 0)
    assert result.counts["restored"] == 14
    assert _nodes() == before and _nodes(f'"{archive}".node') == []


def test_row_that_two_parents_share_is_archived_once(archive: str) -> None:
    execute(
        "CREATE TABLE person (id int PRIMARY KEY, email text, old boolean NOT NULL);"
        "CREATE TABLE letter (id int PRIMARY KEY, email text); CREATE INDEX ON letter (email);"
        "INSERT INTO person VALUES (1, 'a', true), (2, 'a', true), (3, 'b', true);"
        "INSERT INTO letter VALUES (1, 'a'), (2, 'b')"
    )
    shared = [Reference("letter.email", "person.email")]
    action = Delete(dependents={"letter": "delete"}, references=shared, archive_to=archive)
    rows = Rows("person", stale=lambda row: row.old, action=action)
    of = Sweep("shop.people", rows, guard=Guard(first_run=False))
    create_archives(of)

    result = run_sweep(of, clock=CLOCK)

    assert (result.outcome, ids("person", "letter")) == ("done", {"person": [], "letter": []}), result
    assert (result.counts["deleted_dependents"], result.counts["archived_rows"]) == (2, 5)
    assert value(f'SELECT count(*) FROM "{archive}".letter') == 2


def test_restored_row_whose_parent_is_left_out_stays_in_the_archive(archive: str) -> None:
    of = _old_nodes(archive, 2, "NULL")
    run = run_sweep(of, clock=CLOCK)
    assert run.run_id is not None

    result = restoration_of(of, run.run_id, "id = 12").carry_out(pause=True)

    assert result.counts["restored"] == 0 and _nodes() == [(15, 15)]
    assert len(_nodes(f'"{archive}".node')) == 14


@pytest.mark.slow
@NEEDS_SESSION
def test_restore_of_a_circle_of_tables_survives_kills(schema: str) -> None:
    of = _archiving({**DECISIONS, "account.main_order": "delete"}, schema=schema, batch=2)
    create_archives(of)
    run = run_sweep(of, clock=CLOCK)
    assert run.run_id is not None

    # So that the kit can fill tables of a circle.
    alter = "'ALTER TABLE ' || conrelid::regclass || ' ALTER CONSTRAINT ' || conname || ' DEFERRABLE'"
    keys = "pg_constraint WHERE contype = 'f' AND connamespace = current_schema()::regnamespace"
    execute(value(f"SELECT string_agg({alter}, ';') FROM {keys}"))

    testing.assert_survives_kill(restoration_of(of, run.run_id).restoring)


@pytest.mark.slow
@NEEDS_SESSION
@pytest.mark.parametrize("null", ["NULL", "NOT NULL"])
def test_restore_of_circles_of_rows_survives_kills(archive: str, null: str) -> None:
    of = _old_nodes(archive, 2, null)
    run = run_sweep(of, clock=CLOCK)
    assert run.run_id is not None

    testing.assert_survives_kill(restoration_of(of, run.run_id).restoring)


def test_circle_without_a_column_that_may_be_null_is_refused(schema: str) -> None:
    execute("ALTER TABLE account ALTER main_order SET NOT NULL")
    before = contents()
    of = _archiving({**DECISIONS, "account.main_order": "delete"}, schema=schema)

    result = run_sweep(of, clock=CLOCK)

    assert (result.outcome, result.reason) == (
        "failed",
        "shop.closed_accounts: orders.account_id, account.main_order link tables in a circle and are NOT NULL, so that "
        'a restore could bring back none of them first; leave out archive_to, decide "keep" about one of the links, '
        "or allow NULL in one of the columns",
    )
    assert contents() == before


def test_table_of_an_archive_is_refused() -> None:
    with pytest.raises(DeclarationError, match='archive_to names a schema.*write archive_to="archive"'):
        Delete(dependents=True, archive_to="archive.account")
