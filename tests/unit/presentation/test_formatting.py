from __future__ import annotations

from typing import Any

import pytest

from housekeeping.presentation.formatting import format_counts, format_run_counts


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
