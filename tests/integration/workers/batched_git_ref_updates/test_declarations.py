"""Declarations of the two sweeps: schedule, limits, labels, settings and plans."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from dramatiq import Actor
from dramatiq.brokers.redis import RedisBroker

from housekeeping import Argument, Settings
from housekeeping.testing.stubs import ManualClock
from tests.integration.workers.batched_git_ref_updates.conftest import AddDeletions
from tests.internals.core import SettingsError
from tests.internals.workers import GIT_SWEEPS as SWEEPS
from tests.internals.workers import LEASE_TTL, cleanup_scheduler, project_cleanup
from tests.internals.workers import git_worker as worker


def test_schedule_limits_and_labels_match_the_document(broker: RedisBroker) -> None:
    # 実行スケジュール, 入力パラメータ, 排他制御, リトライ仕様, 備考
    lease = cleanup_scheduler.lease
    assert lease is not None
    assert (lease.key, lease.ttl) == ("batched_git_ref_updates/cleanup_scheduler", timedelta(minutes=10))
    assert cleanup_scheduler.schedule == "* * * * *"
    assert (cleanup_scheduler.limits.batch, cleanup_scheduler.options["max_projects"]) == (100, 10_000)
    assert (cleanup_scheduler.actor["feature_category"], cleanup_scheduler.actor["data_consistency"]) == (
        "gitaly",
        "sticky",
    )
    assert cleanup_scheduler.counts == ("total_projects", "enqueued", "deduplicated")
    assert (cleanup_scheduler.queue, cleanup_scheduler.argument) == ("cronjob", None)
    assert cleanup_scheduler.limits.runtime < LEASE_TTL
    for sweep in SWEEPS:
        actor: Actor[..., Any] = broker.actors[sweep.name]
        assert (actor.options["max_retries"], actor.options["idempotent"]) == (25, True)


def test_limits_and_labels_match_the_document() -> None:
    # document 58, 備考
    assert project_cleanup.options == {"page_size": 1000, "git_batch_size": 100, "max_deletes": 10_000}
    assert (project_cleanup.queue, project_cleanup.schedule) == ("git_refs", None)
    assert (project_cleanup.actor["feature_category"], project_cleanup.actor["data_consistency"]) == (
        "gitaly",
        "delayed",
    )
    assert project_cleanup.counts == ("total_deletes", "invalid", "failed")
    assert project_cleanup.argument == Argument("project id", int)


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
    assert configured.limits.batch == given.get("batch_size", sweep.limits.batch)


@pytest.mark.parametrize(
    ("name", "given", "says"),
    [
        (cleanup_scheduler.name, {"max_deletes": 5}, "max_deletes"),
        (cleanup_scheduler.name, {"stale_after_s": 5}, "stale_after_s"),
        (cleanup_scheduler.name, {"max_runtime_s": 600}, "limits.runtime must be below"),
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
