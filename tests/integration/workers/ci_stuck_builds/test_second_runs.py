"""Workers of the stuck builds are idempotent without middleware and messages (I4)."""

from __future__ import annotations

from typing import Any

import pytest

from housekeeping.sweeps.declaration import Sweep
from housekeeping.sweeps.engine.runner import run_sweep
from housekeeping.testing import ManualClock
from housekeeping.workers.ci_stuck_builds.models import Build
from housekeeping.workers.ci_stuck_builds.worker import drop_canceling, drop_running, drop_scheduled
from tests.integration.workers.ci_stuck_builds.tables import NOW, STALE, AddBuilds

ZONED_STALE = "timestamptz '2026-01-01 00:00:00Z' - interval '1 hour 1 second'"


def rows() -> list[Any]:
    return list(Build.select().order_by(Build.id).dicts())


@pytest.mark.parametrize(
    ("sweep", "status"), [(drop_running, "running"), (drop_scheduled, "scheduled"), (drop_canceling, "canceling")]
)
def test_a_second_run_changes_nothing(
    either: type[Build], add_builds: AddBuilds, clock: ManualClock, sweep: Sweep, status: str
) -> None:
    # I4
    add_builds(5, status, STALE, STALE, scheduled_at=ZONED_STALE)
    add_builds(5, status, NOW, NOW, first_id=10, scheduled_at=NOW)
    assert run_sweep(sweep, clock=clock).counts["dropped"] == 5
    before = rows()

    again = run_sweep(sweep, clock=clock)

    assert (again.outcome, again.counts["dropped"], again.counts["doomed"], again.counts["failed"]) == ("done", 0, 0, 0)
    assert rows() == before
