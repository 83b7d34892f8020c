"""Declarations of the built-in workers: the figures of their documents, and the settings that each of them takes."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any, Final

import pytest
from dramatiq.brokers.stub import StubBroker

from housekeeping import Settings, Sweep, install
from tests.internals.core import SettingsError
from tests.internals.database import database
from tests.internals.workers import BUILT_IN, configured_sweeps

SWEEPS: Final = {sweep.name: sweep for family in BUILT_IN for sweep in family.SWEEPS}
STATUSES: Final = "user_status_cleanup.batch"
IMPORTS: Final = "bulk_imports.stale_import"
UPLOADS: Final = "object_storage.delete_stale_direct_uploads"
SCHEDULER: Final = "batched_git_ref_updates.cleanup_scheduler"
CLEANUP: Final = "batched_git_ref_updates.project_cleanup"
PARENT: Final = "ci.stuck_jobs"
CHILDREN: Final = tuple(f"ci.stuck_builds.drop_{status}" for status in ("pending", "running", "scheduled", "canceling"))


def figures(sweep: Sweep) -> dict[str, Any]:
    """Return what documents say of a worker, under their names of the settings where it is one."""
    lease = sweep.lease and (sweep.lease.key_for(7 if sweep.argument else None), sweep.lease.ttl)
    return {
        "schedule": sweep.schedule,
        "batch_size": sweep.limits.batch,
        "max_runtime": sweep.limits.runtime,
        "stale_after": sweep.stale_after,
        "lease": lease,
        "queue": sweep.queue,
        "argument": sweep.argument and sweep.argument.label,
        "category": sweep.actor.get("feature_category"),
        "consistency": sweep.actor.get("data_consistency"),
        "deduplicate": sweep.actor.get("deduplicate"),
        "longest_run": sweep.alerts.longest_run,
        "backlog": sweep.alerts.backlog,
        "failed_runs": sweep.alerts.failed_runs,
        "enabled": sweep.enabled,
        "counts": sweep.counts,
        **{name: value for name, value in sweep.options.items() if name != "stale_after_s"},
    }


def minutes(number: float) -> timedelta:
    return timedelta(minutes=number)


def _child(status: str, stale_after: timedelta) -> dict[str, Any]:
    # Document 6, 排他制御, 目標処理時間, 監視・アラート, 備考
    return {
        "schedule": None,
        "batch_size": 100,
        "max_runtime": minutes(25),
        "stale_after": stale_after,
        "lease": (f"ci/stuck_builds/drop_{status}", minutes(30)),
        "longest_run": minutes(30),
        "category": "continuous_integration",
        "consistency": "always",
        "counts": ("dropped", "doomed", "failed", "out_of_time"),
    }


#: Worker -> its figures.
DOCUMENTED: Final[dict[str, dict[str, Any]]] = {
    STATUSES: {  # 実行スケジュール, 備考, 監視・アラート
        "schedule": "* * * * *",
        "batch_size": 100,
        "max_runtime": timedelta(seconds=30),
        "category": "user_profile",
        "consistency": "sticky",
        "longest_run": timedelta(seconds=60),
        "backlog": 10_000,
    },
    IMPORTS: {  # 実行スケジュール, パフォーマンス要件, 備考
        "schedule": "0 */4 * * *",
        "page_size": 1000,
        "batch_size": 100,
        "max_runtime": minutes(5),
        "stale_after": timedelta(hours=24),
        "lease": None,
        "category": "importers",
        "consistency": "sticky",
    },
    UPLOADS: {  # 実行スケジュール, 入力パラメータ, 排他制御, 監視・アラート, 備考
        "schedule": "*/6 * * * *",
        "max_runtime": timedelta(seconds=250),
        "stale_after": timedelta(hours=3),
        "category": "job_artifacts",
        "consistency": "sticky",
        "deduplicate": "until_executed",
        "longest_run": timedelta(seconds=250),
        "backlog": 10_000,
        "failed_runs": 3,
    },
    SCHEDULER: {  # 実行スケジュール, 入力パラメータ, 排他制御, 備考
        "schedule": "* * * * *",
        "batch_size": 100,
        "max_projects": 10_000,
        "lease": ("batched_git_ref_updates/cleanup_scheduler", minutes(10)),
        "category": "gitaly",
        "consistency": "sticky",
        "counts": ("total_projects", "enqueued", "deduplicated"),
    },
    CLEANUP: {  # 備考
        "schedule": None,
        "page_size": 1000,
        "git_batch_size": 100,
        "max_deletes": 10_000,
        "lease": ("batched_git_ref_updates/project_cleanup/7", minutes(10)),
        "queue": "git_refs",
        "argument": "project id",
        "category": "gitaly",
        "consistency": "delayed",
        "counts": ("total_deletes", "invalid", "failed"),
    },
    "batched_git_ref_updates.processed_deletions": {"schedule": "50 2 * * *"},
    CHILDREN[0]: _child("pending", timedelta(days=1)),
    CHILDREN[1]: _child("running", timedelta(hours=1)),
    CHILDREN[2]: _child("scheduled", timedelta(hours=1)),
    CHILDREN[3]: _child("canceling", timedelta(hours=1)),
    PARENT: {"schedule": "0 * * * *", "category": "continuous_integration", "consistency": "always"},
}


@pytest.fixture
def restored() -> Iterator[None]:
    """Restore the names of the tables after the test."""
    yield
    configured_sweeps(Settings.load())


@pytest.mark.parametrize("name", DOCUMENTED)
def test_schedule_limits_and_labels_match_the_document(name: str) -> None:
    expected = {"queue": "cronjob", "argument": None, **DOCUMENTED[name]}
    found = figures(SWEEPS[name])

    assert {key: found[key] for key in expected} == expected
    assert SWEEPS[name].lease is None or found["max_runtime"] < found["lease"][1]


def test_actors_are_retried_25_times_and_take_no_argument(settings: Settings) -> None:
    # リトライ仕様, 入力パラメータ, 障害時対応 (idempotent!)
    actors = install(StubBroker(middleware=[]), settings)

    for name in DOCUMENTED:
        assert (actors[name].options["max_retries"], actors[name].options["idempotent"]) == (25, True)
        with pytest.raises(TypeError):
            actors[name].fn(1, 2)
        if name != CLEANUP:
            with pytest.raises(TypeError):
                actors[name].fn(1)
    database.initialize(None)


@pytest.mark.parametrize(
    ("name", "given", "changed"),
    [
        (STATUSES, {"batch_size": 50}, {"batch_size": 50}),
        (IMPORTS, {"page_size": 7, "log_records": False}, {"page_size": 7, "log_records": False}),
        (
            UPLOADS,
            {"stale_after_s": 60, "batch_size": 500, "max_runtime_s": 10, "log_records": True},
            {"stale_after": minutes(1), "batch_size": 500, "max_runtime": timedelta(seconds=10), "log_records": True},
        ),
        (
            SCHEDULER,
            {"schedule": "*/5 * * * *", "batch_size": 10, "max_projects": 50, "lease_ttl_s": 900},
            {"schedule": "*/5 * * * *", "batch_size": 10, "max_projects": 50}
            | {"lease": ("batched_git_ref_updates/cleanup_scheduler", minutes(15))},
        ),
        (
            CLEANUP,
            {"page_size": 10, "git_batch_size": 5, "max_deletes": 30, "max_runtime_s": 60},
            {"page_size": 10, "git_batch_size": 5, "max_deletes": 30, "max_runtime": minutes(1)},
        ),
        (
            CHILDREN[3],
            {"enabled": False, "schedule": "45 * * * *", "batch_size": 50, "max_runtime_s": 600}
            | {"stale_after_s": 7200, "lease_ttl_s": 900, "log_records": False},
            {"enabled": False, "schedule": "45 * * * *", "batch_size": 50, "max_runtime": minutes(10)}
            | {"stale_after": timedelta(hours=2), "log_records": False}
            | {"lease": ("ci/stuck_builds/drop_canceling", minutes(15))},
        ),
    ],
)
@pytest.mark.usefixtures("restored")
def test_documented_settings_apply_to_their_worker_only(
    name: str, given: dict[str, Any], changed: dict[str, Any]
) -> None:
    before = {each: figures(sweep) for each, sweep in configured_sweeps(Settings.load()).items()}

    after = configured_sweeps(Settings.load(workers={name: given}))

    found = {each: figures(sweep) for each, sweep in after.items()}
    assert found.pop(name) == before.pop(name) | changed
    assert found == before


@pytest.mark.parametrize(
    ("name", "wrong", "said"),
    [
        (IMPORTS, {"lease_ttl_s": 60}, '"lease_ttl_s"'),
        (IMPORTS, {"max_projects": 5}, '"max_projects"'),
        (IMPORTS, {"git_batch_size": 5}, '"git_batch_size"'),
        (IMPORTS, {"table": "imports"}, "bulk_imports, bulk_import_entities, bulk_import_trackers"),
        (IMPORTS, {"tables": {"imports": "p_imports"}}, "bulk_imports, bulk_import_entities, bulk_import_trackers"),
        (UPLOADS, {"page_size": 10}, '"page_size"'),
        (SCHEDULER, {"max_deletes": 5}, '"max_deletes"'),
        (SCHEDULER, {"stale_after_s": 5}, '"stale_after_s"'),
        (SCHEDULER, {"max_runtime_s": 600}, "limits.runtime must be below"),
        (CLEANUP, {"max_projects": 5}, '"max_projects"'),
        (CLEANUP, {"log_records": True}, '"log_records"'),
        (CLEANUP, {"batch_size": 5}, "page_size"),
        *((PARENT, {key: 60}, f'"{key}"') for key in ("page_size", "batch_size", "max_runtime_s", "stale_after_s")),
        (PARENT, {"lease_ttl_s": 60}, '"lease_ttl_s"'),
        (CHILDREN[3], {"max_projects": 10}, '"max_projects"'),
        (CHILDREN[2], {"max_runtime_s": 1800}, "limits.runtime must be below"),
        (CHILDREN[1], {"tables": {"builds": "b"}}, "ci_builds"),
    ],
)
@pytest.mark.usefixtures("restored")
def test_settings_that_a_worker_does_not_use_are_rejected(name: str, wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(SettingsError, match=f"{name}.*{said}"):
        configured_sweeps(Settings.load(workers={name: wrong}))
