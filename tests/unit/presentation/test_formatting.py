from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from housekeeping.presentation.formatting import format_age, format_counts, format_run_counts


def test_counts_are_formatted_without_zeros() -> None:
    assert format_counts({"deleted_rows": 21_200, "batches": 212, "failed": 0, "out_of_time": True}) == (
        "deleted_rows 21,200, batches 212, out_of_time"
    )
    assert format_counts({"deleted_rows": 0, "out_of_time": False}) == "nothing to do"


def test_non_numeric_count_is_formatted_unchanged() -> None:
    assert format_counts({"last": "2026-11", "rate": 1234.5, "of": ["a"]}) == "last 2026-11, rate 1,234.5, of ['a']"


@pytest.mark.parametrize(
    ("outcome", "counts", "text"),
    [
        ("done", {"deleted_rows": 0}, "nothing to do"),
        ("failed", {"deleted_rows": 0}, "-"),
        ("failed", {"deleted_rows": 3}, "deleted_rows 3"),
        ("skipped", {}, "-"),
        (None, {}, "-"),
    ],
)
def test_only_a_run_that_ended_well_had_nothing_to_do(outcome: str | None, counts: dict[str, Any], text: str) -> None:
    assert format_run_counts(outcome, counts) == text


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(7200, "2 h ago"), (0, "0 ms ago"), (-1, "0 ms ago"), (-1.1, "in 1.1 s"), (-72_000, "in 20 h")],
)
def test_age_of_a_future_time_says_how_far_ahead_it_is(seconds: float, shown: str) -> None:
    now = datetime(2026, 1, 1, tzinfo=UTC)

    assert format_age(now - timedelta(seconds=seconds), now) == shown
