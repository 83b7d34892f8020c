"""Checks of throttles by `doctor`: limits on WAL, and functions of the application."""

from __future__ import annotations

import pytest

from housekeeping import Settings, Throttle
from tests.declarations import changed
from tests.internals.database import Database
from tests.internals.doctor import examine, stages
from tests.internals.workers import status_sweep as sweep
from tests.session_settings import set_in_session


def findings(settings: Settings, limits: Throttle) -> list[tuple[str, str, str]]:
    limited = changed(sweep, throttle=limits)
    return [(each.level, each.subject, each.text) for each in stages.examine_throttles(settings, {sweep.name: limited})]


def test_default_limits_have_no_finding(settings: Settings, postgres: Database) -> None:
    assert findings(settings, Throttle()) == []


def test_wal_limits_that_can_be_read_are_fine(settings: Settings, postgres: Database) -> None:
    found = findings(settings, Throttle(wal_mb_per_s=50, slot_lag_mb=1000))

    assert found == [("fine", "gates wal_mb_per_s, slot_lag_mb", "the server's WAL can be read")]


def test_wal_limit_that_cannot_be_read_is_a_warning(settings: Settings, postgres: Database) -> None:
    postgres.execute_sql("CREATE VIEW pg_replication_slots AS SELECT 1 AS restart_lsn")
    set_in_session(postgres, f"search_path TO {settings.namespace}, pg_catalog")

    ((level, subject, text),) = findings(settings, Throttle(slot_lag_mb=1000))

    assert (level, subject) == ("warning", "gates slot_lag_mb")
    assert text.endswith("; runs continue without this throttle")


@pytest.mark.parametrize(("reason", "text"), [(None, "no reason to wait"), ("sale day\nuntil noon", "waits: sale day")])
def test_result_of_a_custom_function_is_shown(settings: Settings, reason: str | None, text: str) -> None:
    found = findings(settings, Throttle(custom=lambda: reason))

    assert found == [("fine", "gates custom", text)]


def test_custom_function_that_fails_is_a_warning(settings: Settings) -> None:
    found = findings(settings, Throttle(custom=lambda: str(1 / 0)))

    text = "the function fails: ZeroDivisionError: division by zero; runs continue without this throttle"
    assert found == [("warning", "gates custom", text)]


def test_doctor_checks_the_throttles_of_every_worker(complete: Settings, tables: None) -> None:
    limited = changed(sweep, throttle=Throttle(slot_lag_mb=1000))

    found = examine(complete, {limited.name: limited})

    assert [(each.area, each.level) for each in found if each.subject == "gates slot_lag_mb"] == [(sweep.name, "fine")]
