"""A sweep that deletes rows with everything that depends on them."""

from __future__ import annotations

from typing import Any

import pytest

from housekeeping import Settings
from housekeeping.testing.stubs import ManualClock
from tests.integration.cascades.shop import NOW, Application, ids, sweep, value
from tests.integration.statements import watch_statements
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


def test_counts_and_cursor_are_committed_with_their_rows(
    accounts: None, application: Application, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another session compares them before each statement of the run."""
    seen: list[tuple[int, int, Any]] = []

    def compare(_: str) -> None:
        rows = "(SELECT count(*) FROM account) + (SELECT count(*) FROM orders) + (SELECT count(*) FROM item)"
        [(left, counts, cursor)] = application.rows(
            f"SELECT {rows}, counts, cursor FROM (SELECT) AS one LEFT JOIN {settings.schema_name}.runs ON true"
        )
        gone = sum((counts or {}).get(name, 0) for name in ("deleted_rows", "deleted_dependents"))
        seen.append((28 - left, gone, cursor))

    watch_statements(monkeypatch, compare)

    run_sweep(sweep(), clock=CLOCK)

    assert [(gone, counted) for gone, counted, _ in seen if gone != counted] == []
    assert len({gone for gone, *_ in seen}) > 5
    # The cursor stays in front of the parents until they are gone.
    assert {gone for gone, _, cursor in seen if cursor is not None and gone < 21} == set()
