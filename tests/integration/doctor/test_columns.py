"""Diagnostics of `doctor` and `init` for missing columns and for partitions."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from peewee import BigAutoField, IntegerField
from psycopg2.extensions import connection as Connection

from housekeeping.core.settings import Settings
from housekeeping.database.connection import BaseModel, Database
from housekeeping.database.primary_key import restore_declared_key
from housekeeping.database.times import UtcDateTimeField
from housekeeping.doctor import columns
from housekeeping.doctor.tables import partitions
from housekeeping.sweeps import Call, Delete, Sweep
from housekeeping.sweeps.registry import Finding
from housekeeping.workers import BUILT_IN, configured_sweeps
from tests.integration.doctor.conftest import Found
from tests.integration.workers.ci_stuck_builds.tables import GITLAB_SHAPED

CI_WORKERS = (
    "ci.stuck_builds.drop_running, ci.stuck_builds.drop_scheduled, ci.stuck_builds.drop_canceling, ci.stuck_jobs"
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
    name="shop.expired",
    stale=lambda now: Coupon.expires_at < now,
    order=(Coupon.expires_at, Coupon.id),
    action=Delete(),
)
called = Sweep(
    name="shop.called",
    stale=lambda now: Coupon.expires_at < now,
    order=(Coupon.expires_at, Coupon.id),
    action=Call(print, then=Delete()),
)


@pytest.fixture(autouse=True)
def own_tables() -> Iterator[None]:
    yield
    for family in BUILT_IN:
        for name, model in family.MODELS.items():
            model._meta.set_table_name(name)
            restore_declared_key(model)
    restore_declared_key(Coupon)


def of_columns(found: Found, *levels: str) -> list[Finding]:
    return [each for each in found(*levels) if each.subject.startswith("columns of")]


@pytest.mark.slow
@pytest.mark.parametrize(("table", "column", "workers"), REQUIRED)
def test_missing_required_column_is_an_error_that_names_its_workers(
    found: Found, postgres: Database, table: str, column: str, workers: str
) -> None:
    postgres.execute_sql(f"ALTER TABLE {table} DROP COLUMN {column} CASCADE")

    [missing] = of_columns(found, "error")

    assert missing.text == f"{table} has no column {column}; needed by {workers}"
    assert missing.way_out is not None and '["tables"]' in missing.way_out
    assert [each.subject for each in found("error") if each.subject == "connection"] == []


@pytest.mark.slow
@pytest.mark.parametrize(("table", "column"), NOT_NEEDED)
def test_missing_column_that_no_worker_uses_is_no_finding(
    found: Found, postgres: Database, table: str, column: str
) -> None:
    postgres.execute_sql(f"ALTER TABLE {table} DROP COLUMN {column}")

    assert of_columns(found, "warning", "error") == []


@pytest.mark.slow
def test_missing_optional_columns_are_fine(found: Found, postgres: Database) -> None:
    postgres.execute_sql("ALTER TABLE ci_builds DROP COLUMN stage, DROP COLUMN name")

    assert of_columns(found, "warning", "error") == []
    assert [each for each in found("warning") if each.subject == "indexes"] == []
    [findings] = of_columns(found, "fine")
    assert findings.text == "optional columns are missing: name, stage; log lines, events and error reports omit them"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "level", "text"),
    [
        ("status TYPE integer USING 0", "error", "ci_builds.status is integer, not"),
        ("status TYPE varchar", None, ""),
        ("created_at TYPE timestamptz", "warning", "ci_builds.created_at is timestamp with time zone, not"),
    ],
)
def test_column_of_an_unsuitable_type_is_a_finding(
    found: Found, postgres: Database, change: str, level: str | None, text: str
) -> None:
    postgres.execute_sql(f"ALTER TABLE ci_builds ALTER COLUMN {change}")

    findings = of_columns(found, "warning", "error")

    assert [each.level for each in findings] == ([] if level is None else [level])
    assert all(each.text.startswith(text) for each in findings)


@pytest.mark.parametrize(("sweep", "missing"), [(expired, ["expires_at"]), (called, ["expires_at", "uses"])])
def test_missing_column_of_an_applications_sweep_is_an_error(
    postgres: Database, complete: Settings, sweep: Sweep, missing: list[str]
) -> None:
    postgres.execute_sql("CREATE TABLE coupon (id bigserial PRIMARY KEY)")

    findings = [each for each in columns.examine(complete, {sweep.name: sweep}) if each.level == "error"]

    assert sorted(each.text for each in findings) == [
        f"coupon has no column {column}; needed by {sweep.name}" for column in missing
    ]


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

    assert list(partitions(settings, configured_sweeps(settings))) == []


@pytest.mark.slow
def test_init_warns_of_a_table_that_is_a_partition(partition: None, environment: dict[str, str]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "housekeeping", "init"], env=environment, capture_output=True, text=True, timeout=60
    )

    assert done.returncode == 0
    assert "warning: ci_builds is a partition of p_ci_builds" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("command", [["plan", "ci.stuck_jobs"], ["run", "ci.stuck_jobs"], ["status"], ["doctor"]])
def test_commands_work_on_a_partition_without_labels(
    partition: None, environment: dict[str, str], postgres: Database, command: list[str]
) -> None:
    postgres.execute_sql("ALTER TABLE p_ci_builds DROP COLUMN stage")

    done = subprocess.run(
        [sys.executable, "-m", "housekeeping", *command, "--json"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )

    said = json.loads(done.stdout)
    assert "stage" not in done.stderr
    if command[0] == "run":
        assert said["outcome"] == "done"
