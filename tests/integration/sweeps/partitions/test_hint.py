"""Plan and doctor of a sweep that deletes rows say when whole partitions could be dropped instead."""

from __future__ import annotations

import dataclasses
from datetime import timedelta
from typing import Any

import pytest

from housekeeping import Delete, Rows, Settings, Sweep
from housekeeping.testing.stubs import ManualClock
from tests.integration.sweeps.partitions.events import NOW, Event, concurrently, create, sweep
from tests.internals.database import Database, database
from tests.internals.doctor import tables
from tests.internals.insight import hint_of, plan
from tests.session_settings import set_in_session


def _deleting(stale: Any = lambda row, limit: row.happened_at < limit) -> Sweep:
    return Sweep("shop.events", Rows(Event, stale=stale, order="happened_at", age=timedelta(days=40), action=Delete()))


def _warnings(of: Sweep) -> list[str]:
    return list(plan(of, clock=ManualClock(NOW)).warnings)


def test_plan_of_a_delete_names_partitions_that_are_stale_as_a_whole(either_way: None) -> None:
    (hint,) = _warnings(_deleting())

    assert hint.startswith("every row of 3 partitions is stale (") and "events_09 to " in hint
    assert "events_11," in hint and hint.endswith("DropPartitions could drop them")


def test_plan_of_a_delete_on_some_rows_has_no_hint(months: None) -> None:
    database.execute_sql("UPDATE events SET exported = NULL WHERE happened_at = '2025-09-04'")

    found = _warnings(_deleting(lambda row, limit: (row.happened_at < limit) & (row.exported == True)))  # noqa: E712

    assert found == []


def test_hint_reads_no_rows_if_the_bounds_decide(months: None) -> None:
    database.execute_sql("ALTER TABLE events ALTER COLUMN exported SET NOT NULL")
    scans = "SELECT sum(seq_scan + coalesce(idx_scan, 0)) FROM pg_stat_xact_user_tables WHERE relname = 'events_09'"

    with database.atomic():
        (before,) = database.execute_sql(scans).fetchone()
        (stage,) = _deleting().stages_for_run()
        hint = hint_of(stage, NOW)
        (after,) = database.execute_sql(scans).fetchone()

    assert hint is not None and before == after


def test_table_without_partitions_has_no_hint(postgres: Database) -> None:
    postgres.create_tables([Event])

    assert _warnings(_deleting()) == []


def _findings(settings: Settings, of: Sweep) -> list[Any]:
    return list(tables.examine_partitions(settings, {of.name: of}))


def test_doctor_names_partitions_that_a_delete_could_drop(postgres: Database, settings: Settings) -> None:
    create()
    # The doctor takes the database's own time.
    (finding,) = _findings(settings, _deleting())

    assert (finding.level, finding.subject) == ("fine", "partitions")
    assert finding.text.startswith("every row of ")


def test_doctor_counts_partitions_and_the_reasons_of_those_that_stay(months: None, settings: Settings) -> None:
    database.execute_sql("CREATE VIEW september AS SELECT * FROM events_09")

    findings = _findings(settings, sweep())

    assert [each.level for each in findings] == ["fine", "warning", "warning"]
    assert "they are detached" in findings[0].text
    assert "(the view september reads it)" in findings[1].text
    assert "the last partition, " in findings[2].text and ".events_12, ends at 2026-01-01 00:00 UTC" in findings[2].text


@concurrently
def test_doctor_names_tables_that_a_removed_worker_has_detached(killed: None, settings: Settings) -> None:
    findings = _findings(settings, dataclasses.replace(sweep(), name="shop.renamed"))

    assert [each.level for each in findings] == ["warning", "fine", "warning"]
    assert "events_09 was detached by shop.old_events, which is not configured" in findings[0].text


@pytest.mark.parametrize("ddl", ["", "PARTITION BY LIST (happened_at)"])
def test_doctor_reports_a_table_whose_partitions_cannot_be_dropped(
    postgres: Database, settings: Settings, ddl: str
) -> None:
    database.execute_sql(f"CREATE TABLE events (id bigint, happened_at timestamptz) {ddl}")

    (finding,) = _findings(settings, sweep())

    assert finding.level == "error" and "partitioned" in finding.text


def test_doctor_reports_partitions_of_another_owner(months: None, settings: Settings) -> None:
    role = f"{settings.namespace}_other"
    database.execute_sql(f"CREATE ROLE {role}")
    database.execute_sql(f"GRANT USAGE ON SCHEMA {settings.namespace} TO {role}")
    try:
        set_in_session(database, f"ROLE {role}")
        (finding,) = _findings(settings, sweep())
    finally:
        set_in_session(database, "ROLE NONE")
        database.execute_sql(f"DROP OWNED BY {role}")
        database.execute_sql(f"DROP ROLE {role}")

    assert finding.level == "error" and "can drop it" in finding.text
