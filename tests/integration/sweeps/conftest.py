"""Fixtures of the tests of the breaker."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from housekeeping.sweeps import breaker
from housekeeping.sweeps.own_tables import NOW, Run
from housekeeping.workers.user_status_cleanup.models import UserStatus
from tests.integration.sweeps.pacing import SMALL

#: Adds runs that ended before, each of which settled so many.
History = Callable[..., None]


@pytest.fixture
def history(statuses: type[UserStatus]) -> History:
    def add(runs: int, settled: int, outcome: str = "done", reason: str | None = None) -> None:
        for _ in range(runs):
            Run.create(
                worker=SMALL.name,
                trigger="schedule",
                started_at=NOW,
                heartbeat_at=NOW,
                finished_at=NOW,
                outcome=outcome,
                reason=reason,
                counts={"deleted_rows": settled},
            )

    return add


@pytest.fixture
def low_floor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten records are enough to trip a breaker."""
    monkeypatch.setattr(breaker, "FLOOR", 10)
