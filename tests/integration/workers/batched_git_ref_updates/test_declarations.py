"""Declarations of the two sweeps: schedule, limits, labels, settings and plans."""

from __future__ import annotations

import json
from datetime import timedelta
from typing import Any

import pytest
from dramatiq import Actor
from dramatiq.brokers.redis import RedisBroker

from housekeeping.core.errors import SettingsError
from housekeeping.core.settings import Settings
from housekeeping.sweeps.insight.plan import dry_run, plan
from housekeeping.testing import ManualClock
from housekeeping.workers.batched_git_ref_updates import worker
from housekeeping.workers.batched_git_ref_updates.worker import LEASE_TTL, SWEEPS, cleanup_scheduler, project_cleanup
from tests.integration.workers.batched_git_ref_updates.conftest import AddDeletions, Pending


def test_schedule_limits_and_labels_match_the_document(broker: RedisBroker) -> None:
    # 実行スケジュール, 入力パラメータ, 排他制御, リトライ仕様, 備考
    lease = cleanup_scheduler.lease
    assert lease is not None
    assert (lease.key, lease.ttl) == ("batched_git_ref_updates/cleanup_scheduler", timedelta(minutes=10))
    assert cleanup_scheduler.schedule == "* * * * *"
    assert (cleanup_scheduler.batch_size, cleanup_scheduler.options["max_projects"]) == (100, 10_000)
    assert (cleanup_scheduler.feature_category, cleanup_scheduler.data_consistency) == ("gitaly", "sticky")
    assert cleanup_scheduler.counts == ("total_projects", "enqueued", "deduplicated")
    assert (cleanup_scheduler.queue, cleanup_scheduler.argument_name) == ("cronjob", None)
    assert cleanup_scheduler.max_runtime < LEASE_TTL
    for sweep in SWEEPS:
        actor: Actor[..., Any] = broker.actors[sweep.name]
        assert (actor.options["max_retries"], actor.options["idempotent"]) == (25, True)


def test_limits_and_labels_match_the_document() -> None:
    # document 58, 備考
    assert project_cleanup.options == {"page_size": 1000, "git_batch_size": 100, "max_deletes": 10_000}
    assert (project_cleanup.queue, project_cleanup.schedule) == ("git_refs", None)
    assert (project_cleanup.feature_category, project_cleanup.data_consistency) == ("gitaly", "delayed")
    assert project_cleanup.counts == ("total_deletes", "invalid", "failed")
    assert (project_cleanup.argument_name, project_cleanup.parse_argument("42")) == ("project id", 42)


def test_plan_matches_the_run_and_changes_nothing(add_deletions: AddDeletions, pending: Pending) -> None:
    add_deletions(12)
    add_deletions(3, "'no ref ' || n")
    add_deletions(5, project="2")

    scheduler, one = plan(cleanup_scheduler), plan(project_cleanup, 1)

    assert (scheduler.stale.rows, scheduler.stages[0][0].samples) == (2, [{"project_id": 1}, {"project_id": 2}])
    assert dry_run(cleanup_scheduler).counts == {"total_projects": 2, "enqueued": 0, "deduplicated": 0}
    assert (one.stale.rows, one.stages[0][0].samples[0]) == (15, {"id": 1, "ref": "refs/heads/1"})
    assert dry_run(project_cleanup, 1).counts == {"total_deletes": 12, "invalid": 3, "failed": 0}
    assert len(pending()) == 20
    json.dumps([scheduler.as_json(), one.as_json()])


def test_backlog_of_all_projects_needs_no_argument(add_deletions: AddDeletions) -> None:
    # As `housekeeping status` asks.
    add_deletions(12, project="n % 3")
    (projects,), (rows,) = cleanup_scheduler.stages_for_run(), project_cleanup.stages_for_run()
    now = ManualClock().now()

    assert (projects.backlog(now, 100).rows, rows.backlog(now, 100).rows) == (3, 12)
    assert rows.backlog(now, 11).exact is False
    assert (projects.oldest(now), rows.oldest(now)) == (None, None)


@pytest.mark.parametrize(
    ("name", "given"),
    [
        (cleanup_scheduler.name, {"schedule": "*/5 * * * *", "batch_size": 10, "max_projects": 50, "lease_ttl_s": 900}),
        (project_cleanup.name, {"page_size": 10, "git_batch_size": 5, "max_deletes": 30, "max_runtime_s": 60}),
    ],
)
def test_documented_settings_are_accepted(settings: Settings, unbound: None, name: str, given: dict[str, Any]) -> None:
    chosen = Settings.load(**{**settings.model_dump(exclude={"workers"}), "workers": {name: given}})
    (sweep,) = [sweep for sweep in worker.SWEEPS if sweep.name == name]

    configured = sweep.configured(chosen.workers[name])

    sizes = {key: value for key, value in given.items() if key in configured.options}
    assert {key: configured.options[key] for key in sizes} == sizes
    assert configured.schedule == given.get("schedule", sweep.schedule)
    assert configured.batch_size == given.get("batch_size", sweep.batch_size)


@pytest.mark.parametrize(
    ("name", "given", "says"),
    [
        (cleanup_scheduler.name, {"max_deletes": 5}, "max_deletes"),
        (cleanup_scheduler.name, {"stale_after_s": 5}, "stale_after_s"),
        (cleanup_scheduler.name, {"max_runtime_s": 600}, "max_runtime must be below"),
        (project_cleanup.name, {"max_projects": 5}, "max_projects"),
        (project_cleanup.name, {"log_records": True}, "log_records"),
        (project_cleanup.name, {"batch_size": 5}, "page_size"),
    ],
)
def test_unused_settings_are_rejected(
    settings: Settings, unbound: None, name: str, given: dict[str, Any], says: str
) -> None:
    chosen = Settings.load(**{**settings.model_dump(exclude={"workers"}), "workers": {name: given}})
    (sweep,) = [sweep for sweep in worker.SWEEPS if sweep.name == name]

    with pytest.raises(SettingsError, match=says):
        sweep.configured(chosen.workers[name])
        worker.configure(chosen)
