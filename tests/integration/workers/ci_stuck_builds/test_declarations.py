"""Document 6: schedule, limits, labels, and settings of these workers."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest

from housekeeping.core.errors import SettingsError
from housekeeping.core.settings import Settings
from housekeeping.database.primary_key import restore_declared_key
from housekeeping.workers import configured_sweeps
from housekeeping.workers.ci_stuck_builds.models import Build
from housekeeping.workers.ci_stuck_builds.worker import SWEEPS, drop_canceling, drop_running, drop_scheduled, stuck_jobs


@pytest.fixture(autouse=True)
def own_table() -> Iterator[None]:
    yield
    Build._meta.set_table_name("ci_builds")
    restore_declared_key(Build)


def test_schedule_limits_and_labels_match_the_document() -> None:
    # 実行スケジュール, 備考, パフォーマンス要件, 監視・アラート
    assert [sweep.name for sweep in SWEEPS] == [
        "ci.stuck_builds.drop_running",
        "ci.stuck_builds.drop_scheduled",
        "ci.stuck_builds.drop_canceling",
        "ci.stuck_jobs",
    ]
    assert [sweep.schedule for sweep in SWEEPS] == [None, None, None, "0 * * * *"]
    assert {sweep.batch_size for sweep in SWEEPS} == {100}
    assert {sweep.max_runtime for sweep in SWEEPS} == {timedelta(minutes=25)}
    assert {sweep.alerts.longest_run for sweep in SWEEPS} == {timedelta(minutes=30)}
    assert {sweep.queue for sweep in SWEEPS} == {"cronjob"}
    assert {(sweep.feature_category, sweep.data_consistency) for sweep in SWEEPS} == {
        ("continuous_integration", "always")
    }
    assert [sweep.stale_after for sweep in SWEEPS] == [*[timedelta(hours=1)] * 3, timedelta(days=1)]


def test_each_has_a_lease_of_30_minutes() -> None:
    # 排他制御
    assert [(sweep.lease.key, sweep.lease.ttl) for sweep in SWEEPS if sweep.lease] == [
        ("ci/stuck_builds/drop_running", timedelta(minutes=30)),
        ("ci/stuck_builds/drop_scheduled", timedelta(minutes=30)),
        ("ci/stuck_builds/drop_canceling", timedelta(minutes=30)),
        ("ci/stuck_jobs", timedelta(minutes=30)),
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
    assert (sweep.enabled, sweep.schedule, sweep.batch_size) == (False, "45 * * * *", 50)
    assert (sweep.max_runtime, sweep.stale_after) == (timedelta(minutes=10), timedelta(hours=2))
    assert sweep.lease is not None and sweep.lease.ttl == timedelta(minutes=15)
    assert sweep.options == {"log_records": False}
    assert Build._meta.table_name == "p_ci_builds"
    assert sweeps[drop_running.name].batch_size == 100


@pytest.mark.parametrize(
    ("worker", "wrong", "said"),
    [
        (stuck_jobs, {"page_size": 10}, '"page_size"'),
        (drop_canceling, {"max_projects": 10}, '"max_projects"'),
        (drop_scheduled, {"max_runtime_s": 1800}, "max_runtime must be below"),
        (drop_running, {"tables": {"builds": "b"}}, "ci_builds"),
    ],
)
def test_others_are_refused_by_name(worker: Any, wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(SettingsError, match=f"{worker.name}.*{said}"):
        configured_sweeps(Settings.load(workers={worker.name: wrong}))
