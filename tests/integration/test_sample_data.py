"""`housekeeping init --with-tables --with-sample-data`."""

from __future__ import annotations

from pathlib import Path

import pytest
import redis

from housekeeping import Settings
from housekeeping.workers.bulk_imports.models import BulkImport
from housekeeping.workers.user_status_cleanup.models import UserStatus
from tests.internals.cli import add_sample_rows
from tests.internals.core import WrongArgument
from tests.internals.database import Database
from tests.internals.engine import run_sweep
from tests.internals.workers import FAMILIES, configured_sweeps

MODELS = [model for module in FAMILIES.values() for model in module.MODELS.values()]


@pytest.fixture
def trial(settings: Settings, postgres: Database, redis_client: redis.Redis, tmp_path: Path) -> Settings:
    """Settings with a folder of repositories, and every table, empty."""
    (tmp_path / "@hashed").mkdir()
    settings = settings.model_copy(update={"repositories_root": tmp_path})
    configured_sweeps(settings)
    postgres.create_tables(MODELS)
    return settings


def test_every_empty_table_gets_a_few_hundred_rows(trial: Settings) -> None:
    rows = add_sample_rows(trial)

    assert [model.select().count() for model in MODELS] == [300, 100, 300, 300, 300, 300]
    assert rows["user_statuses"] == 300


@pytest.mark.parametrize(
    ("worker", "counts"),
    [
        ("user_status_cleanup.batch", {"deleted_rows": 200, "batches": 2}),
        ("bulk_imports.stale_import", {"timed_out_imports": 20, "timed_out_entities": 60, "timed_out_trackers": 10}),
        ("ci.stuck_builds.drop_pending", {"dropped": 25}),
        ("ci.stuck_builds.drop_running", {"dropped": 25}),
        ("ci.stuck_builds.drop_scheduled", {"dropped": 25}),
        ("ci.stuck_builds.drop_canceling", {"dropped": 25}),
    ],
)
def test_each_worker_has_something_to_do(trial: Settings, worker: str, counts: dict[str, int]) -> None:
    add_sample_rows(trial)

    result = run_sweep(configured_sweeps(trial)[worker])

    assert result.outcome == "done"
    assert {name: value for name, value in result.counts.items() if value} == counts


def test_a_table_with_rows_is_refused_and_nothing_is_changed(trial: Settings) -> None:
    BulkImport.insert(user_id=1).execute()

    with pytest.raises(
        WrongArgument, match="^table bulk_imports already has rows; sample data is only for empty tables"
    ):
        add_sample_rows(trial)

    assert UserStatus.select().count() == 0


def test_refs_are_left_out_without_repositories(trial: Settings) -> None:
    rows = add_sample_rows(trial.model_copy(update={"repositories_root": None}))

    assert [table for table in rows if "batched_git" in table] == []
