"""Doctor while one table is locked, as by a migration, or cannot be examined."""

from __future__ import annotations

from typing import Any

import pytest
from peewee import ProgrammingError

from housekeeping import Settings
from tests.integration.conftest import Locked
from tests.integration.doctor.conftest import Found
from tests.internals.database import quoted_name
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
