"""Doctor while one table is locked, as by a migration, or cannot be examined."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from types import ModuleType
from typing import Any

import pytest
import redis
from peewee import ProgrammingError

from housekeeping import Delete, Rows, Settings, Subject, Sweep
from tests.integration.conftest import Locked
from tests.integration.doctor.conftest import Found
from tests.integration.erasure.shop import with_key
from tests.internals.database import Database, quoted_name
from tests.internals.doctor import examine
from tests.internals.doctor import tables as tables_check
from tests.internals.workers import configured_sweeps

LOCKED = "user_status_cleanup.batch"


def test_locked_table_is_a_warning_of_its_worker_alone(found: Found, locked: Locked) -> None:
    with locked("LOCK TABLE user_statuses IN ACCESS EXCLUSIVE MODE"):
        findings = found("warning", "fine", "error")

    unexamined = [each for each in findings if "could not be examined" in each.text]
    assert {each.area for each in unexamined} == {LOCKED}
    assert all("lock timeout" in each.text for each in unexamined)
    fine = {(each.area, each.subject) for each in findings if each.level == "fine"}
    assert {("ci.stuck_builds.drop_pending", "indexes"), ("postgres", "outbox")} <= fine


@pytest.mark.parametrize(
    ("statement", "error"),
    [("LOCK TABLE visit", "lock timeout"), ("ALTER TABLE closed RENAME at TO closed_at", "has no column 'at'")],
)
def test_own_sweep_that_cannot_be_examined_hides_no_other(
    settings: Settings,
    postgres: Database,
    redis_client: redis.Redis,
    locked: Locked,
    monkeypatch: pytest.MonkeyPatch,
    statement: str,
    error: str,
) -> None:
    postgres.execute_sql(
        "CREATE TABLE closed (id int PRIMARY KEY, at timestamptz);"
        "CREATE TABLE page (id int PRIMARY KEY, at timestamptz);"
        "CREATE TABLE visit (id int PRIMARY KEY, closed_id int REFERENCES closed ON DELETE CASCADE)"
    )
    module: Any = ModuleType("doctors_sweeps")
    module.SWEEPS = tuple(
        Sweep(name, Rows(name, stale=lambda row, now: row.at < now, order="at", action=Delete(dependents=True)))
        for name in ("page", "closed")
    )
    module.SUBJECTS = (Subject("person", "closed", tables={"visit": Delete()}),)
    monkeypatch.setitem(sys.modules, "doctors_sweeps", module)
    given = with_key(settings, sweeps=("doctors_sweeps",), built_in=())

    with locked(statement) if statement.startswith("LOCK") else nullcontext(postgres.execute_sql(statement)):
        findings = list(examine(given, configured_sweeps(given)))

    wrong = [each for each in findings if error in each.text]
    assert {each.area for each in wrong} <= {"closed", "subjects"} and wrong
    assert ("fine", "page", f"table {settings.namespace}.page") in {
        (each.level, each.area, each.subject) for each in findings
    }
    assert all("did not answer" not in each.text for each in findings)
    way_out = "housekeeping doctor --database" if error == "lock timeout" else "correct the sweep's code"
    assert all(str(each.way_out).endswith(way_out) for each in wrong), wrong


def test_table_that_fails_a_check_hides_no_other(
    complete: Settings, tables: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(model: Any) -> str:
        if "user_statuses" in (name := quoted_name(model)):
            raise ProgrammingError("permission denied")
        return name

    monkeypatch.setattr(tables_check, "quoted_name", failing)
    findings = list(examine(complete, configured_sweeps(complete)))

    assert ("could not be examined: permission denied", "warning") in {(each.text, each.level) for each in findings}
    assert any(each.area.startswith("ci.") and each.subject == "table ci_builds" for each in findings)
