"""Dependents in another database."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from peewee import OperationalError

from housekeeping import Delete, Guard, Reference, Settings
from housekeeping.testing.stubs import ManualClock
from tests.declarations import only
from tests.integration.cascades.shop import NOW, execute, ids, sweep
from tests.integration.several_databases import CI, rows
from tests.internals.database import Database, database
from tests.internals.engine import run_sweep

CLOCK = ManualClock(NOW)
BUILDS = "SELECT id FROM build ORDER BY id"
LOGS = "SELECT id FROM log ORDER BY id"


def _sweep(**decisions: Any) -> Any:
    declared = sweep()
    references = [Reference("build.account", "account.id", database=CI)]
    action = Delete(dependents={"build": "delete", **decisions}, references=references)
    return replace(declared, stages=replace(only(declared), action=action))


@pytest.fixture
def builds(two: Settings, accounts: None) -> None:
    """Builds of each account, with logs, in the other database."""
    with database.using(CI):
        execute(
            "CREATE TABLE build (id int PRIMARY KEY, account bigint);"
            "CREATE TABLE log (id int PRIMARY KEY, build_id int NOT NULL REFERENCES build ON DELETE CASCADE);"
            "CREATE INDEX ON build (account); CREATE INDEX ON log (build_id);"
            "INSERT INTO build SELECT n, 1 + (n - 1) / 5 FROM generate_series(1, 20) AS n;"
            "INSERT INTO log SELECT n, n FROM generate_series(1, 20) AS n"
        )


def test_they_are_deleted_before_their_parents(builds: None) -> None:
    result = run_sweep(_sweep(), clock=CLOCK)

    assert (result.outcome, result.counts["deleted_rows"], result.counts["failed"]) == ("done", 3, 0)
    assert (rows(CI, BUILDS), rows(CI, LOGS)) == ([16, 17, 18, 19, 20],) * 2
    assert ids("account") == {"account": [4]}
    assert result.counts["details"]["dependents"]["log"] == {"deleted": 15}


def test_locked_one_keeps_its_parent(builds: None) -> None:
    handle = database.by_name()[CI]
    other = handle._connect()
    other.autocommit = False
    other.cursor().execute("SELECT FROM log WHERE id = 7 FOR UPDATE")

    result = run_sweep(_sweep(), clock=CLOCK)

    assert (result.outcome, ids("account")) == ("done", {"account": [2, 4]})
    assert rows(CI, LOGS) == [7, 16, 17, 18, 19, 20]
    other.rollback()
    other.close()


def test_they_cannot_be_archived(builds: None) -> None:
    of = _sweep()
    archiving = replace(only(of).action, archive_to="old_rows")

    result = run_sweep(replace(of, stages=replace(only(of), action=archiving)), clock=CLOCK)

    assert (result.outcome, len(rows(CI, BUILDS))) == ("failed", 20)
    assert "build.account is in the database 'ci', which cannot move rows to the archive" in str(result.reason)


@pytest.mark.parametrize(("share", "outcome"), [(0.9, "done"), (0.1, "failed")])
def test_breaker_compares_with_the_tables_of_the_sweeps_database(builds: None, share: float, outcome: str) -> None:
    execute("INSERT INTO item SELECT n, 8 FROM generate_series(100, 199) AS n")

    result = run_sweep(replace(_sweep(), guard=Guard(share=share, action="stop", first_run=False)), clock=CLOCK)

    assert result.outcome == outcome, result.reason


def test_kept_one_blocks_its_parent(builds: None) -> None:
    result = run_sweep(_sweep(build="keep"), clock=CLOCK)

    assert (result.outcome, result.counts["blocked"], len(rows(CI, BUILDS))) == ("done", 3, 20)


@pytest.mark.parametrize("point", range(6))
def test_unavailable_server_keeps_their_parents(builds: None, monkeypatch: pytest.MonkeyPatch, point: int) -> None:
    """The server becomes unavailable before one of the statements, for the rest of the run."""
    left, execute_sql = point, Database.execute_sql

    def fail(self: Database, sql: str, params: Any = None) -> Any:
        nonlocal left
        if self is database.by_name()[CI] and "unnest" in sql and "pg_" not in sql:
            left -= 1
            if left < 0:
                raise OperationalError("the server is unavailable")
        return execute_sql(self, sql, params)

    with monkeypatch.context() as patch:
        patch.setattr(Database, "execute_sql", fail)
        result = run_sweep(_sweep(), clock=CLOCK)

    assert (result.outcome, result.counts["deleted_rows"]) == ("failed", 0)
    assert "the server is unavailable" in str(result.reason)
    assert ids("account") == {"account": [1, 2, 3, 4]}
    assert run_sweep(_sweep(), clock=CLOCK).outcome == "done"
    assert (ids("account"), rows(CI, BUILDS)) == ({"account": [4]}, [16, 17, 18, 19, 20])
