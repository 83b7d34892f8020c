"""A sweep that deletes rows with everything that depends on them."""

from __future__ import annotations

from housekeeping.testing.stubs import ManualClock
from tests.integration.cascades.shop import NOW, ids, sweep, value
from tests.internals.engine import run_sweep

CLOCK = ManualClock(NOW)


def test_parents_go_with_their_dependents(accounts: None) -> None:
    result = run_sweep(sweep(), clock=CLOCK)

    assert result.outcome == "done", result
    assert result.counts == {
        "deleted_rows": 3,
        "deleted_dependents": 18,
        "cleared_dependents": 3,
        "blocked": 0,
        "failed": 0,
        "batches": 8,
        "out_of_time": False,
        "details": {
            "dependents": {"item": {"deleted": 12}, "orders": {"deleted": 6}, "comment": {"cleared": 3}},
        },
    }
    assert ids() == {"account": [4], "orders": [7, 8], "item": [13, 14, 15, 16], "comment": [1, 2, 3, 4]}
    assert value("SELECT array_agg(author_id ORDER BY id) FROM comment") == [None, None, None, 4]
