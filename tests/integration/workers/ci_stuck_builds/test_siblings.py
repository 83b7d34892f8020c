"""Document 6, 前後の処理との関連: the two siblings, with the same rules and other limits."""

from __future__ import annotations

import logging

import pytest

from housekeeping import Sweep
from housekeeping.testing.stubs import ManualClock
from housekeeping.workers.ci_stuck_builds.models import Build
from tests.integration.workers.ci_stuck_builds.tables import HOUR_AGO, NOW, STALE, AddBuilds, Refuse, by_status, lines
from tests.internals.database import database
from tests.internals.engine import run_sweep
from tests.internals.workers import drop_running, drop_scheduled

#: The manual clock's time in a column that has a zone.
ZONED_HOUR_AGO = "timestamptz '2026-01-01 00:00:00+00' - interval '1 hour'"
ZONED_STALE = f"{ZONED_HOUR_AGO} - interval '1 microsecond'"


def test_running_builds_not_updated_for_more_than_an_hour_are_dropped(
    either: type[Build], add_builds: AddBuilds, clock: ManualClock
) -> None:
    add_builds(1, "running", NOW, STALE, first_id=1)
    add_builds(1, "running", STALE, HOUR_AGO, first_id=2)
    add_builds(1, "running", STALE, f"{HOUR_AGO} + interval '1 microsecond'", first_id=3)
    add_builds(1, "canceling", STALE, STALE, first_id=4)

    result = run_sweep(drop_running, clock=clock)

    assert result.counts == {"dropped": 1, "doomed": 0, "failed": 0, "out_of_time": False}
    assert by_status() == {"failed": [1], "running": [2, 3], "canceling": [4]}
    assert Build.get(Build.id == 1).failure_reason == 3


def test_builds_scheduled_for_more_than_an_hour_ago_are_dropped_as_stale(
    either: type[Build], add_builds: AddBuilds, clock: ManualClock
) -> None:
    add_builds(1, "scheduled", STALE, NOW, first_id=1, scheduled_at=ZONED_STALE)
    add_builds(1, "scheduled", STALE, STALE, first_id=2, scheduled_at=ZONED_HOUR_AGO)
    add_builds(1, "scheduled", STALE, STALE, first_id=3, scheduled_at=f"{ZONED_HOUR_AGO} + interval '1 microsecond'")
    add_builds(1, "scheduled", STALE, STALE, first_id=4, scheduled_at="NULL")

    result = run_sweep(drop_scheduled, clock=clock)

    assert result.counts == {"dropped": 1, "doomed": 0, "failed": 0, "out_of_time": False}
    assert by_status() == {"failed": [1], "scheduled": [2, 3, 4]}
    assert Build.get(Build.id == 1).failure_reason == 7


@pytest.mark.parametrize(
    ("sweep", "status", "reason", "start"),
    [
        (drop_running, "running", "stuck_or_timeout_failure", "Cleaning running, timed-out builds"),
        (drop_scheduled, "scheduled", "stale_schedule", "Cleaning scheduled, timed-out builds"),
    ],
)
def test_siblings_log_their_start_messages(
    builds: type[Build],
    add_builds: AddBuilds,
    clock: ManualClock,
    caplog: pytest.LogCaptureFixture,
    sweep: Sweep,
    status: str,
    reason: str,
    start: str,
) -> None:
    caplog.set_level(logging.INFO)
    add_builds(1, status, STALE, STALE, scheduled_at=ZONED_STALE)

    run_sweep(sweep, clock=clock)

    assert len(lines(caplog, start)) == 1
    (line,) = lines(caplog, "Dropping outdated build")
    assert (line["build_id"], line["status"], line["failure_reason"]) == (1, status, reason)


@pytest.mark.parametrize(("sweep", "status"), [(drop_running, "running"), (drop_scheduled, "scheduled")])
def test_siblings_doom_undroppable_builds(
    either: type[Build], add_builds: AddBuilds, refuse: Refuse, clock: ManualClock, sweep: Sweep, status: str
) -> None:
    add_builds(3, status, STALE, STALE, scheduled_at=ZONED_STALE)
    refuse("OLD.id = 3 OR (OLD.id = 2 AND NEW.failure_reason IS DISTINCT FROM 12)")

    result = run_sweep(sweep, clock=clock)

    assert result.counts == {"dropped": 1, "doomed": 1, "failed": 1, "out_of_time": False}


def test_running_builds_without_a_creation_time_are_dropped_too(builds: type[Build], add_builds: AddBuilds) -> None:
    # Upstream the column may be NULL.
    with database.atomic():
        database.execute_sql("ALTER TABLE ci_builds ALTER COLUMN created_at DROP NOT NULL")
    add_builds(250, "running", "CASE n % 2 WHEN 0 THEN timestamp '2025-01-01' END", STALE)

    result = run_sweep(drop_running, clock=ManualClock())

    assert (result.outcome, result.counts["dropped"]) == ("done", 250)


def test_running_builds_at_infinite_and_ancient_times_are_dropped_too(
    builds: type[Build], add_builds: AddBuilds
) -> None:
    times = "(ARRAY['-infinity', '0044-03-15 BC', '2025-01-01'])[1 + n % 3]::timestamp"
    add_builds(300, "running", times, STALE)

    result = run_sweep(drop_running, clock=ManualClock())

    assert (result.outcome, result.counts["dropped"]) == ("done", 300)
