"""Diagnostics of `doctor` and `init` for missing columns and for partitions."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from peewee import BigAutoField, IntegerField, ProgrammingError
from psycopg2.extensions import connection as Connection

from housekeeping import BaseModel, Call, Delete, Rows, Settings, Sweep, UtcDateTimeField
from tests.command_processes import CommandProcesses
from tests.declarations import changed
from tests.integration.doctor.conftest import Found
from tests.integration.workers.ci_stuck_builds.tables import GITLAB_SHAPED
from tests.internals.core import error_line
from tests.internals.database import Database, restore_declared_key
from tests.internals.doctor import lone_partitions, stages
from tests.internals.doctor import tables as columns
from tests.internals.engine import Finding
from tests.internals.insight import plan
from tests.internals.workers import BUILT_IN, configured_sweeps

CI_WORKERS = (
    "ci.stuck_builds.drop_pending, ci.stuck_builds.drop_running, ci.stuck_builds.drop_scheduled, "
    "ci.stuck_builds.drop_canceling"
)
#: Table, a column that its workers need, and the workers.
REQUIRED = [
    ("ci_builds", "lock_version", CI_WORKERS),
    ("ci_builds", "scheduled_at", "ci.stuck_builds.drop_scheduled"),
    ("ci_builds", "finished_at", CI_WORKERS),
    ("bulk_imports", "updated_at", "bulk_imports.stale_import"),
    ("bulk_import_trackers", "status", "bulk_imports.stale_import"),
    ("user_statuses", "clear_status_at", "user_status_cleanup.batch"),
    (
        "batched_git_ref_updates_deletions",
        "ref",
        "batched_git_ref_updates.project_cleanup",
    ),
]
NOT_NEEDED = [("bulk_imports", "has_failures"), ("bulk_import_entities", "jid"), ("bulk_import_trackers", "relation")]


class Coupon(BaseModel):
    id = BigAutoField()
    expires_at = UtcDateTimeField()
    uses = IntegerField()


expired = Sweep(
    "shop.expired", Rows(Coupon, stale=lambda row, now: row.expires_at < now, order="expires_at", action=Delete())
)
called = Sweep(
    "shop.called",
    Rows(Coupon, stale=lambda row, now: row.expires_at < now, order="expires_at", action=Call(print, then=Delete())),
)


@pytest.fixture(autouse=True)
def own_tables() -> Iterator[None]:
    yield
    for family in BUILT_IN:
        for name, model in family.MODELS.items():
            model._meta.set_table_name(name)
            restore_declared_key(model)
    restore_declared_key(Coupon)


def of_columns(settings: Settings, *levels: str) -> list[Finding]:
    return [each for each in columns.examine_columns(settings, configured_sweeps(settings)) if each.level in levels]


@pytest.mark.parametrize(("table", "column", "workers"), REQUIRED)
def test_missing_required_column_is_an_error_that_names_its_workers(
    complete: Settings, tables: None, postgres: Database, table: str, column: str, workers: str
) -> None:
    postgres.execute_sql(f"ALTER TABLE {table} DROP COLUMN {column} CASCADE")

    missing = of_columns(complete, "error")

    assert ", ".join(each.area for each in missing) == workers
    assert {each.text for each in missing} == {f"table {table} has no column {column}"}
    assert all(each.way_out is not None and '["tables"]' in each.way_out for each in missing)


@pytest.mark.parametrize(("table", "column"), NOT_NEEDED)
def test_missing_column_that_no_worker_uses_is_no_finding(
    complete: Settings, tables: None, postgres: Database, table: str, column: str
) -> None:
    postgres.execute_sql(f"ALTER TABLE {table} DROP COLUMN {column}")

    assert of_columns(complete, "warning", "error") == []


@pytest.mark.slow
def test_only_missing_columns_that_are_needed_are_errors_of_doctor(found: Found, postgres: Database) -> None:
    postgres.execute_sql("ALTER TABLE ci_builds DROP COLUMN stage, DROP COLUMN name")
    postgres.execute_sql("ALTER TABLE user_statuses DROP COLUMN clear_status_at CASCADE")

    everything = found("fine", "warning", "error")

    of_each = {level: [each for each in everything if each.level == level] for level in ("fine", "warning", "error")}
    optional, required = (
        [each.text for each in of_each[level] if each.subject.startswith("columns of")] for level in ("fine", "error")
    )
    assert optional == ["optional columns are missing: name, stage; log lines, events and error reports omit them"]
    assert required == ["table user_statuses has no column clear_status_at"]
    assert [each for each in of_each["warning"] if each.subject == "indexes" and each.area.startswith("ci.")] == []
    assert [each for each in of_each["warning"] if each.subject.startswith("columns of")] == []
    assert "connection" not in {each.subject for each in of_each["error"]}


@pytest.mark.parametrize(
    ("change", "texts"),
    [
        ("status TYPE integer USING 0", {"column ci_builds.status is integer, not character or"}),
        ("status TYPE varchar", set()),
        ("created_at TYPE timestamptz", set()),  # sessions are in UTC
    ],
)
def test_column_of_an_unsuitable_type_is_an_error(
    complete: Settings, tables: None, postgres: Database, change: str, texts: set[str]
) -> None:
    postgres.execute_sql(f"ALTER TABLE ci_builds ALTER COLUMN {change}")

    findings = of_columns(complete, "warning", "error")

    assert {each.text.partition(" character varying")[0] for each in findings} == texts


@pytest.mark.parametrize(("sweep", "missing"), [(expired, ["expires_at"]), (called, ["expires_at", "uses"])])
def test_missing_column_of_an_applications_sweep_is_an_error(
    postgres: Database, complete: Settings, sweep: Sweep, missing: list[str]
) -> None:
    postgres.execute_sql("CREATE TABLE coupon (id bigserial PRIMARY KEY)")

    [finding] = columns.examine_columns(complete, {sweep.name: sweep})

    assert (finding.level, finding.text) == ("error", f"table coupon has no column {', '.join(missing)}")


@pytest.fixture
def partition(tables: None, postgres: Database, admin: Connection, settings: Settings) -> None:
    """Create `ci_builds` as the first partition of `p_ci_builds`."""
    postgres.execute_sql("DROP TABLE ci_builds")
    with admin.cursor() as cursor:
        cursor.execute(f"SET search_path TO {settings.namespace}")
        cursor.execute(GITLAB_SHAPED)


def test_table_that_is_a_partition_is_a_warning_that_names_its_parent(found: Found, partition: None) -> None:
    [findings] = [each for each in found("warning") if each.subject == "table ci_builds"]

    assert findings.text == f"ci_builds is a partition of p_ci_builds: {CI_WORKERS} see only the rows of this partition"
    assert findings.way_out is not None and findings.way_out.endswith('to {"ci_builds": "p_ci_builds"}')


def test_table_with_partitions_is_no_warning(complete: Settings, partition: None) -> None:
    given: dict[str, Any] = {"ci.stuck_jobs": {"table": "p_ci_builds"}}
    settings = Settings.load(**complete.model_dump(exclude={"workers"}), workers=given)

    assert list(lone_partitions(settings, configured_sweeps(settings))) == []


@pytest.mark.slow
def test_init_warns_of_a_table_that_is_a_partition(
    partition: None, environment: dict[str, str], command_processes: CommandProcesses, tmp_path: Path
) -> None:
    done = command_processes.run(["init"], environment, tmp_path, timeout_s=60)

    assert done.returncode == 0
    assert "warning: ci_builds is a partition of p_ci_builds" in done.stderr


@pytest.mark.parametrize("kind", ["bigint", "text", "jsonb"])
def test_comparison_that_fails_in_a_plan_is_an_error_reported_once(
    postgres: Database, settings: Settings, kind: str
) -> None:
    postgres.execute_sql(f"CREATE TABLE coupon (id bigserial PRIMARY KEY, expires_at {kind}, uses int)")

    with pytest.raises(ProgrammingError) as planned:
        plan(expired)
    [finding] = stages.examine_stages(settings, {expired.name: expired})

    assert (finding.level, finding.subject, finding.way_out) == ("error", "predicate", "correct `stale`")
    assert finding.text == error_line(planned.value)
    assert finding.text.startswith(f"operator does not exist: {kind} < timestamp with time zone")


def test_inverted_comparison_is_a_warning(postgres: Database, settings: Settings) -> None:
    postgres.create_tables([Coupon])
    postgres.execute_sql("INSERT INTO coupon (expires_at, uses) VALUES (now(), 0), (now() - interval '90 days', 0)")
    newest = changed(expired, stale=lambda row, now: row.expires_at > now - timedelta(days=14))

    [finding] = [
        each for each in stages.examine_stages(settings, {expired.name: newest}) if each.subject == "predicate"
    ]

    assert finding.level == "warning"
    assert finding.text.startswith("the only stale row will not be stale when older: `stale` takes newer rows")
