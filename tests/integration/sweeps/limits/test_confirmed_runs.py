from __future__ import annotations

from collections.abc import Callable

import pytest

from housekeeping.testing.stubs import ManualClock
from tests.declarations import changed
from tests.integration.conftest import AddStatuses
from tests.integration.sweeps.conftest import History
from tests.integration.sweeps.engine.sizing import DUE, SMALL
from tests.internals.engine import run_sweep
from tests.internals.ledger import Run


@pytest.mark.parametrize("action", ["stop", "limit"])
def test_confirmed_run_processes_more_than_its_breaker_allows(
    add_statuses: AddStatuses,
    history: History,
    low_floor: None,
    clock: ManualClock,
    last_run: Callable[[], Run],
    caplog: pytest.LogCaptureFixture,
    action: str,
) -> None:
    history(10, 0)
    add_statuses(100, DUE)

    with caplog.at_level("INFO"):
        result = run_sweep(changed(SMALL, guard_action=action), clock=clock, confirmed=True)

    assert (result.outcome, result.counts["deleted_rows"]) == ("done", 100)
    assert last_run().counts["confirmed"] is True
    assert "Run is confirmed" in [record.getMessage() for record in caplog.records]
