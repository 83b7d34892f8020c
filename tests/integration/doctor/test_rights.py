"""Database rights of the built-in workers."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from psycopg2.extensions import connection as Connection

from housekeeping import Settings
from housekeeping.workers.batched_git_ref_updates.models import Deletion
from housekeeping.workers.bulk_imports.models import BulkImport, BulkImportEntity, BulkImportTracker
from housekeeping.workers.ci_stuck_builds.models import BUILD_TYPE, Build, BuildStatus
from housekeeping.workers.user_status_cleanup.models import UserStatus
from tests.integration.roles import connected_as_a_role
from tests.internals.database import Database
from tests.internals.doctor import examine, grants, missing_rights, needed_rights
from tests.internals.engine import run_sweep
from tests.internals.workers import SourceType, configured_sweeps, families, hashed_path

LONG_AGO = datetime.now(UTC) - timedelta(days=30)


@pytest.fixture
def role(tables: None, postgres: Database, settings: Settings, admin: Connection) -> Iterator[str]:
    """Connect with a role that has exactly the documented rights."""
    with connected_as_a_role(postgres, settings, admin, needed_rights(settings)) as name:
        yield name


def test_workers_run_with_exactly_the_documented_rights(
    tables: None, postgres: Database, complete: Settings, request: pytest.FixtureRequest
) -> None:
    root = complete.repositories_root
    assert root is not None
    _stale(root)
    request.getfixturevalue("role")
    sweeps = configured_sweeps(complete)

    results = {
        name: run_sweep(sweep, 1 if sweep.argument else None)
        for name, sweep in sweeps.items()
        # These two only enqueue, and use no table.
        if name not in ("ci.stuck_jobs", "batched_git_ref_updates.cleanup_scheduler") and sweep.enabled
    }

    assert {name: (result.outcome, result.reason) for name, result in results.items()} == dict.fromkeys(
        results, ("done", None)
    )
    counted = {
        name: sum(result.counts[count] for count in sweeps[name].progress_counts) for name, result in results.items()
    }
    assert counted["user_status_cleanup.batch"] == 1
    assert counted["bulk_imports.stale_import"] == 2
    assert counted["ci.stuck_builds.drop_running"] == 1
    assert counted["batched_git_ref_updates.project_cleanup"] == 1


def test_revoked_right_is_reported_as_missing(role: str, settings: Settings, admin: Connection) -> None:
    needed = needed_rights(settings)
    before = missing_rights("ci_builds", needed["ci_builds"])

    with admin.cursor() as cursor:
        cursor.execute(f"REVOKE UPDATE (lock_version) ON {settings.namespace}.ci_builds FROM {role}")
        cursor.execute(f"REVOKE DELETE ON {settings.namespace}.user_statuses FROM {role}")

    assert before == []
    assert missing_rights("ci_builds", needed["ci_builds"]) == [needed["ci_builds"][1]]
    assert missing_rights("user_statuses", needed["user_statuses"]) == ["DELETE"]


@pytest.fixture
def elsewhere(complete: Settings) -> Iterator[Settings]:
    """Configure another schema for one worker's table."""
    given = complete.model_dump(exclude={"workers"})
    table = f"{complete.namespace}.user_statuses"
    yield Settings.load(**given, workers={"user_status_cleanup.batch": {"table": table}})
    configured_sweeps(complete)


def test_schema_without_usage_right_is_an_error(role: str, elsewhere: Settings, admin: Connection) -> None:
    sweeps = configured_sweeps(elsewhere)
    with admin.cursor() as cursor:
        cursor.execute(f"REVOKE USAGE ON SCHEMA {elsewhere.namespace} FROM {role}")

    findings = [each for each in examine(elsewhere, sweeps) if each.level == "error"]

    way_out = f'GRANT USAGE ON SCHEMA "{elsewhere.namespace}" TO {role}'
    assert (findings[0].area, findings[0].subject, findings[0].way_out) == (
        "user_status_cleanup.batch",
        "rights on user_statuses",
        way_out,
    )
    assert {each.subject for each in findings[1:]} >= {"table ci_builds", "table bulk_imports"}
    assert "connection" not in {each.subject for each in findings}


def _stale(root: Path) -> None:
    UserStatus.create(user_id=1, clear_status_at=LONG_AGO)
    an_import = BulkImport.create(user_id=1, updated_at=LONG_AGO, created_at=LONG_AGO)
    entity = BulkImportEntity.create(
        bulk_import=an_import,
        project_id=1,
        source_type=SourceType.PROJECT_ENTITY,
        source_full_path="a/b",
        updated_at=LONG_AGO,
    )
    BulkImportTracker.create(bulk_import_entity=entity, relation="members")
    Build.create(
        id=1, type=BUILD_TYPE, project_id=1, status=BuildStatus.RUNNING, created_at=LONG_AGO, updated_at=LONG_AGO
    )
    Deletion.create(project_id=1, ref="refs/heads/gone", created_at=LONG_AGO, updated_at=LONG_AGO)
    repository = root / hashed_path(1)
    repository.parent.mkdir(parents=True)
    subprocess.run(["git", "init", "-q", "--bare", str(repository)], check=True)


def test_declared_rights_name_the_tables_of_the_models() -> None:
    assert all(set(family.rights) == set(family.models) for family in families(Settings.load()))


def test_documented_grants_match_the_code() -> None:
    page = (Path(__file__).parents[3] / "docs" / "howto" / "rights.md").read_text()
    documented = [
        line.removesuffix(";") for line in page.splitlines() if line.startswith("GRANT") and "SCHEMA" not in line
    ]

    assert sorted(documented) == sorted(grants("housekeeping", needed_rights(Settings())))


def _row_security(complete: Settings) -> list[tuple[str, str | None]]:
    found = [each for each in examine(complete, configured_sweeps(complete)) if each.subject == "rows of ci_builds"]
    assert all(each.level == "error" for each in found)
    return [(each.text, each.way_out) for each in found]


def test_row_level_security_that_hides_rows_is_an_error(role: str, complete: Settings, admin: Connection) -> None:
    with admin.cursor() as cursor:
        cursor.execute("ALTER TABLE ci_builds ENABLE ROW LEVEL SECURITY")

    [(text, way_out)] = _row_security(complete)

    assert f"applies to {role}: " in text and "may see no rows" in text
    assert way_out is not None
    with admin.cursor() as cursor:
        cursor.execute(way_out.split(", or ")[1])
    assert _row_security(complete) == []


@pytest.mark.parametrize(
    ("policies", "is_hidden"),
    [
        ("CREATE POLICY a ON ci_builds USING (true)", False),
        ("CREATE POLICY a ON ci_builds TO {role} USING (project_id = 1)", True),
        ("CREATE POLICY a ON ci_builds FOR SELECT TO {role} USING (true)", True),
        ("CREATE POLICY a ON ci_builds TO pg_monitor USING (true)", True),
        ("CREATE POLICY a ON ci_builds USING (true); CREATE POLICY b ON ci_builds AS RESTRICTIVE USING (id > 1)", True),
        ("ALTER ROLE {role} BYPASSRLS", False),
    ],
)
def test_policies_decide_whether_rows_are_hidden(
    role: str, complete: Settings, admin: Connection, policies: str, is_hidden: bool
) -> None:
    with admin.cursor() as cursor:
        cursor.execute("ALTER TABLE ci_builds ENABLE ROW LEVEL SECURITY;" + policies.format(role=role))

    assert bool(_row_security(complete)) == is_hidden
