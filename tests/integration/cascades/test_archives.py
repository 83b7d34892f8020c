"""Archive of all tables of a cascade, and the restore that brings everything back."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from housekeeping import DeclarationError, Delete, Sweep, testing
from housekeeping.testing.stubs import ManualClock
from tests.declarations import only
from tests.integration.archives.tickets import create_archives
from tests.integration.cascades.shop import NOW, execute, ids, sweep, value
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


def test_run_without_its_archives_changes_nothing(schema: str) -> None:
    before = contents()

    result = run_sweep(_archiving(schema=schema), clock=CLOCK)

    assert result.outcome == "failed" and "archive" in str(result.reason)
    assert contents() == before


@pytest.mark.parametrize("batch", [1, 3, 50])
def test_restore_brings_a_circle_of_tables_back(schema: str, batch: int) -> None:
    """Orders depend on accounts, which depend on their main order."""
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


@pytest.mark.slow
@NEEDS_SESSION
def test_restore_of_a_circle_survives_kills(schema: str) -> None:
    of = _archiving({**DECISIONS, "account.main_order": "delete"}, schema=schema, batch=2)
    create_archives(of)
    run = run_sweep(of, clock=CLOCK)
    assert run.run_id is not None

    # So that the kit can fill tables of a circle.
    alter = "'ALTER TABLE ' || conrelid::regclass || ' ALTER CONSTRAINT ' || conname || ' DEFERRABLE'"
    keys = "pg_constraint WHERE contype = 'f' AND connamespace = current_schema()::regnamespace"
    execute(value(f"SELECT string_agg({alter}, ';') FROM {keys}"))

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
