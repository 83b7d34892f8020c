"""Built-in workers are active only where their tables fit."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
import redis

from housekeeping import Settings, Sweep
from housekeeping.workers.ci_stuck_builds.models import Build
from housekeeping.workers.user_status_cleanup.models import UserStatus
from tests.faults import at_step, lose_database
from tests.internals.database import Database, database_now, forget_table, restore_declared_key
from tests.internals.doctor import examine
from tests.internals.engine import run_sweep
from tests.internals.insight import as_json, worker_status
from tests.internals.ledger import Run
from tests.internals.workers import FAMILIES, configured_sweeps

STATUSES = "user_status_cleanup.batch"
UPLOADS = "object_storage.delete_stale_direct_uploads"
JOBS = "ci.stuck_jobs"


@pytest.fixture
def sweeps(settings: Settings, postgres: Database, redis_client: redis.Redis) -> Iterator[dict[str, Sweep]]:
    yield configured_sweeps(settings)
    restore_declared_key(Build)


def problem(sweep: Sweep) -> str | None:
    found = sweep.lacks()
    return None if found is None else found.text


def test_worker_without_its_table_is_skipped_without_an_alert(sweeps: dict[str, Sweep], settings: Settings) -> None:
    result = run_sweep(sweeps[STATUSES])

    seen = worker_status(sweeps[STATUSES], database_now(), settings.timezone)
    assert (result.outcome, result.reason, result.exit_code) == ("skipped", "not_set_up", 0)
    assert (seen.state, seen.next_tick, seen.alarms) == ("not_set_up", None, [])
    assert as_json(seen)["not_set_up"] == "table user_statuses is not in this database"


def test_fresh_installation_raises_no_alert_and_no_finding(sweeps: dict[str, Sweep], settings: Settings) -> None:
    alerts = [worker_status(sweep, database_now(), settings.timezone).alarms for sweep in sweeps.values()]

    assert alerts == [[]] * len(sweeps)
    assert [each for each in examine(settings, sweeps) if each.level == "error"] == []
    found = {each.subject: each.text for each in examine(settings, sweeps) if each.area == "workers"}
    assert [*found] == [*FAMILIES]
    assert "table ci_builds is not in this database; off: ci.stuck_builds.drop_pending" in found["ci_stuck_builds"]


def test_table_created_later_is_noticed(sweeps: dict[str, Sweep], postgres: Database) -> None:
    assert run_sweep(sweeps[STATUSES]).reason == "not_set_up"

    postgres.create_tables([UserStatus])

    assert run_sweep(sweeps[STATUSES]).outcome == "done"


@pytest.mark.parametrize(
    ("columns", "text"),
    [
        ("id int, user_id int, online boolean", "table user_statuses has no column clear_status_at"),
        ("user_id uuid, clear_status_at timestamptz", "column user_statuses.user_id is uuid, not bigint or integer"),
        ("user_id int, clear_status_at text", "column user_statuses.clear_status_at is text, not timestamp with"),
    ],
)
def test_different_table_of_that_name_is_left_alone(
    sweeps: dict[str, Sweep], postgres: Database, columns: str, text: str
) -> None:
    postgres.execute_sql(f"CREATE TABLE user_statuses ({columns})")

    assert (problem(sweeps[STATUSES]) or "").startswith(text)
    assert run_sweep(sweeps[STATUSES]).reason == "not_set_up"


@pytest.mark.parametrize(
    "columns",
    [
        "user_id smallint PRIMARY KEY, clear_status_at timestamp",
        "user_id bigint PRIMARY KEY, clear_status_at timestamptz, note jsonb",
    ],
)
def test_types_are_compared_loosely(sweeps: dict[str, Sweep], postgres: Database, columns: str) -> None:
    postgres.execute_sql(f"CREATE TABLE user_statuses ({columns})")

    assert problem(sweeps[STATUSES]) is None


def test_status_column_may_be_an_enum(sweeps: dict[str, Sweep], postgres: Database) -> None:
    postgres.create_tables([Build])
    postgres.execute_sql("CREATE TYPE build_status AS ENUM ('pending', 'failed')")
    postgres.execute_sql("ALTER TABLE ci_builds ALTER status TYPE build_status USING status::build_status")

    assert problem(sweeps[JOBS]) is None


def test_optional_columns_may_be_missing(sweeps: dict[str, Sweep], postgres: Database) -> None:
    postgres.create_tables([Build])
    postgres.execute_sql("ALTER TABLE ci_builds DROP stage, DROP runner_id")

    assert problem(sweeps[JOBS]) is None


def test_every_family_fits_the_tables_of_its_models(sweeps: dict[str, Sweep], postgres: Database) -> None:
    postgres.create_tables([model for module in FAMILIES.values() for model in module.MODELS.values()])

    assert {name for name, sweep in sweeps.items() if sweep.lacks()} == {UPLOADS}


def test_uploads_are_cleaned_where_a_store_is_configured(settings: Settings, sweeps: dict[str, Sweep]) -> None:
    assert problem(sweeps[UPLOADS]) == "HOUSEKEEPING_OBJECT_STORES is not set"

    told = settings.model_dump(exclude={"object_stores"})
    configured = configured_sweeps(Settings.load(**told, object_stores=json.dumps({"uploads": "file:///tmp"})))

    assert problem(configured[UPLOADS]) is None


def test_table_dropped_after_a_completed_run_is_a_failure(sweeps: dict[str, Sweep], postgres: Database) -> None:
    postgres.create_tables([UserStatus])
    assert run_sweep(sweeps[STATUSES]).outcome == "done"
    postgres.execute_sql("DROP TABLE user_statuses")
    forget_table(UserStatus)

    assert run_sweep(sweeps[STATUSES]).outcome == "failed"


def test_named_family_that_does_not_fit_is_an_error(settings: Settings, postgres: Database) -> None:
    named = settings.model_copy(update={"built_in": ("user_status_cleanup",)})
    sweeps = configured_sweeps(named)

    assert run_sweep(sweeps[STATUSES]).outcome == "failed"
    errors = [each.text for each in examine(named, sweeps) if each.level == "error"]
    assert any('"user_statuses" is not in this database' in text for text in errors)


def test_worker_is_not_dropped_while_the_database_is_away(sweeps: dict[str, Sweep], postgres: Database) -> None:
    with at_step(Database, "execute_sql", "before", lose_database):
        result = run_sweep(sweeps[STATUSES])

    assert (result.outcome, result.reason) == ("failed", "database: the server closed the connection")
    assert Run.select().count() == 0
