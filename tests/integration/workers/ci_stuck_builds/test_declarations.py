"""Document 6: schedule, limits, labels, and settings of these workers."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest

from housekeeping import Settings
from housekeeping.workers.ci_stuck_builds.models import Build
from tests.internals.core import SettingsError
from tests.internals.database import restore_declared_key
from tests.internals.workers import BUILD_SWEEPS as SWEEPS
from tests.internals.workers import configured_sweeps, drop_canceling, drop_running, drop_scheduled, stuck_jobs


@pytest.fixture(autouse=True)
def own_table() -> Iterator[None]:
    yield
    Build._meta.set_table_name("ci_builds")
    restore_declared_key(Build)


def test_schedule_limits_and_labels_match_the_document() -> None:
    # 実行スケジュール, 備考, パフォーマンス要件, 監視・アラート
    assert [sweep.name for sweep in SWEEPS] == [
        "ci.stuck_builds.drop_pending",
        "ci.stuck_builds.drop_running",
        "ci.stuck_builds.drop_scheduled",
        "ci.stuck_builds.drop_canceling",
        "ci.stuck_jobs",
    ]
    assert [sweep.schedule for sweep in SWEEPS] == [None, None, None, None, "0 * * * *"]
    children = SWEEPS[:-1]
    assert {sweep.limits.batch for sweep in children} == {100}
    assert {sweep.limits.runtime for sweep in children} == {timedelta(minutes=25)}
    assert {sweep.alerts.longest_run for sweep in children} == {timedelta(minutes=30)}
    assert {sweep.queue for sweep in SWEEPS} == {"cronjob"}
    assert {(sweep.actor["feature_category"], sweep.actor["data_consistency"]) for sweep in SWEEPS} == {
        ("continuous_integration", "always")
    }
    assert [sweep.stale_after for sweep in children] == [timedelta(days=1), *[timedelta(hours=1)] * 3]


def test_each_child_has_a_lease_of_30_minutes() -> None:
    # 排他制御
    assert [(sweep.lease.key, sweep.lease.ttl) for sweep in SWEEPS if sweep.lease] == [
        ("ci/stuck_builds/drop_pending", timedelta(minutes=30)),
        ("ci/stuck_builds/drop_running", timedelta(minutes=30)),
        ("ci/stuck_builds/drop_scheduled", timedelta(minutes=30)),
        ("ci/stuck_builds/drop_canceling", timedelta(minutes=30)),
    ]


def test_the_settings_of_these_workers_are_taken() -> None:
    given: dict[str, Any] = {
        "enabled": False,
        "schedule": "45 * * * *",
        "batch_size": 50,
        "max_runtime_s": 600,
        "stale_after_s": 7200,
        "lease_ttl_s": 900,
        "table": "p_ci_builds",
        "log_records": False,
    }

    sweeps = configured_sweeps(Settings.load(workers={drop_canceling.name: given}))

    sweep = sweeps[drop_canceling.name]
    assert (sweep.enabled, sweep.schedule, sweep.limits.batch) == (False, "45 * * * *", 50)
    assert (sweep.limits.runtime, sweep.stale_after) == (timedelta(minutes=10), timedelta(hours=2))
    assert sweep.lease is not None and sweep.lease.ttl == timedelta(minutes=15)
    assert sweep.options["log_records"] is False
    assert Build._meta.table_name == "p_ci_builds"
    assert sweeps[drop_running.name].limits.batch == 100


@pytest.mark.parametrize(
    ("worker", "wrong", "said"),
    [
        (stuck_jobs, {"page_size": 10}, '"page_size"'),
        (stuck_jobs, {"batch_size": 50}, '"batch_size"'),
        (stuck_jobs, {"max_runtime_s": 60}, '"max_runtime_s"'),
        (stuck_jobs, {"stale_after_s": 60}, '"stale_after_s"'),
        (stuck_jobs, {"lease_ttl_s": 60}, '"lease_ttl_s"'),
        (drop_canceling, {"max_projects": 10}, '"max_projects"'),
        (drop_scheduled, {"max_runtime_s": 1800}, "limits.runtime must be below"),
        (drop_running, {"tables": {"builds": "b"}}, "ci_builds"),
    ],
)
def test_others_are_refused_by_name(worker: Any, wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(SettingsError, match=f"{worker.name}.*{said}"):
        configured_sweeps(Settings.load(workers={worker.name: wrong}))
