"""Single builds, as applications drop them: `build.drop(reason)`, `build.doom()`."""

from __future__ import annotations

from typing import Any

import pytest
from psycopg2.extensions import connection as Connection

from housekeeping.workers.ci_stuck_builds.models import Build, BuildStatus, FailureReason, machine
from tests.integration.workers.ci_stuck_builds.tables import STALE, AddBuilds
from tests.internals.core import IllegalEvent
from tests.internals.database import database_now

ENDED = ["success", "failed", "canceled", "skipped"]
OPEN = [status.value for status in BuildStatus if status.value not in ENDED]


@pytest.mark.parametrize("status", OPEN)
def test_a_build_that_has_not_ended_can_be_dropped(either: type[Build], add_builds: AddBuilds, status: str) -> None:
    add_builds(1, status, STALE, STALE)
    build, before = Build.get(Build.id == 1), database_now()

    build.drop(FailureReason.API_FAILURE)

    again = Build.get(Build.id == 1)
    assert build.__data__ == again.__data__
    assert (again.status, again.failure_reason, again.lock_version) == (BuildStatus.FAILED, 2, 4)
    assert before <= again.finished_at == again.updated_at <= database_now()


@pytest.mark.parametrize("event", ["drop", "doom"])
@pytest.mark.parametrize("status", ENDED)
def test_a_build_that_has_ended_refuses_and_says_so(
    builds: type[Build], add_builds: AddBuilds, status: str, event: str
) -> None:
    add_builds(1, status, STALE, STALE)
    build = Build.get(Build.id == 1)

    with pytest.raises(IllegalEvent, match=f"Build 1 is {status}: {event} is allowed from created, pending"):
        getattr(build, event)()

    assert Build.get(Build.id == 1).lock_version == 3


def test_without_a_reason_the_failure_is_unknown(builds: type[Build], add_builds: AddBuilds) -> None:
    add_builds(1, "running", STALE, STALE)

    Build.get(Build.id == 1).drop()

    assert Build.get(Build.id == 1).failure_reason is None


def test_a_changed_build_is_read_again_and_dropped_at_once(
    either: type[Build], add_builds: AddBuilds, admin: Connection
) -> None:
    # リトライ仕様: 即時
    add_builds(1, "running", STALE, STALE)
    build = Build.get(Build.id == 1)
    _change(admin, "lock_version = 9, runner_id = 77, status = 'canceling'")

    build.drop(FailureReason.SCRIPT_FAILURE)

    again = Build.get(Build.id == 1)
    assert (again.status, again.lock_version, again.runner_id) == ("failed", 10, 77)
    assert build.lock_version == 10


def test_doomed_build_of_any_version_has_failed_for_damaged_data(builds: type[Build], add_builds: AddBuilds) -> None:
    add_builds(1, "canceling", STALE, STALE, lock_version="2147483647")
    before = database_now()

    Build.get(Build.id == 1).doom()

    doomed = Build.get(Build.id == 1)
    assert (doomed.status, doomed.failure_reason, doomed.lock_version) == ("failed", 12, 1)
    assert before <= doomed.finished_at <= database_now()


def test_build_without_a_version_is_dropped(builds: type[Build], add_builds: AddBuilds) -> None:
    add_builds(1, "running", STALE, STALE, lock_version="NULL")

    Build.get(Build.id == 1).drop(FailureReason.SCRIPT_FAILURE)

    assert Build.get(Build.id == 1).lock_version == 1


def test_of_two_builds_with_one_id_in_two_partitions_one_is_dropped(
    gitlab_builds: type[Build], add_builds: AddBuilds
) -> None:
    add_builds(1, "running", STALE, STALE, partition_id="101")
    add_builds(1, "running", STALE, STALE, partition_id="102")

    Build.get_by_id((1, 102)).drop(FailureReason.SCRIPT_FAILURE)

    found: Any = Build.select()
    assert {(build.partition_id, build.status) for build in found} == {(101, "running"), (102, "failed")}


def test_the_machine_has_every_status_and_shows_its_diagram() -> None:
    assert sorted(machine.sources("drop")) == sorted(OPEN)
    assert (machine.target("drop"), machine.target("doom")) == ("failed", "failed")
    assert "canceling --> failed: drop, doom" in machine.diagram()
    assert [(reason.label, reason.value) for reason in FailureReason] == [
        ("script_failure", 1),
        ("api_failure", 2),
        ("stuck_or_timeout_failure", 3),
        ("runner_system_failure", 4),
        ("stale_schedule", 7),
        ("job_execution_timeout", 8),
        ("data_integrity_failure", 12),
    ]


def _change(admin: Connection, change: str) -> None:
    meta: Any = Build._meta
    with admin.cursor() as cursor:
        cursor.execute(f"UPDATE {meta.table_name} SET {change} WHERE id = 1")
