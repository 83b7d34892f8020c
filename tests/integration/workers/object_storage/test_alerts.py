"""Document 100, 監視・アラート."""

from __future__ import annotations

from datetime import timedelta

import pytest

from housekeeping.testing.stubs import ManualClock
from tests.faults import redis_fault
from tests.integration.workers.object_storage.conftest import Configure, Lines, Prepare
from tests.integration.workers.object_storage.places import Folder
from tests.internals.engine import run_sweep
from tests.internals.workers import LARGEST_BACKLOG
from tests.internals.workers import uploads_sweep as sweep

pytestmark = pytest.mark.usefixtures("postgres", "pending")


def test_run_over_250_seconds_raises_an_alert(folder: Folder, configure: Configure, lines: Lines) -> None:
    # 監視・アラート: 処理時間, 250秒超過
    configure(artifacts=folder.settings())
    # The clock is read when the run begins, when its last batch ends, and at its end.
    run_sweep(sweep, clock=ManualClock(tick=timedelta(seconds=125)))
    assert lines("Alert") == []

    run_sweep(sweep, clock=ManualClock(tick=timedelta(seconds=126)))

    assert [line["alarm"] for line in lines("Alert")] == ["longest_run"]


@pytest.mark.slow
@pytest.mark.parametrize(("waiting", "rings"), [(-1, []), (0, []), (1, ["backlog"])])
def test_over_10_000_stale_uploads_raise_an_alert(
    folder: Folder,
    configure: Configure,
    prepared: Prepare,
    lines: Lines,
    waiting: int,
    rings: list[str],
) -> None:
    # 監視・アラート: ペンディングエントリ蓄積. The store is unavailable, so all are left.
    configure(artifacts=folder.missing())
    prepared(*(f"may/{number}" for number in range(LARGEST_BACKLOG + waiting)))
    prepared("may/fresh", ago=timedelta())

    run_sweep(sweep, clock=ManualClock())

    assert [line["alarm"] for line in lines("Alert")] == rings


def test_redis_outage_at_the_backlog_alert_keeps_the_run(
    folder: Folder, configure: Configure, lines: Lines, clock: ManualClock
) -> None:
    configure(artifacts=folder.settings())

    with redis_fault("\r\nEVAL\r\n"):
        result = run_sweep(sweep, clock=clock)

    assert result.outcome == "failed"
    assert len(lines("Could not count the backlog")) == 1
