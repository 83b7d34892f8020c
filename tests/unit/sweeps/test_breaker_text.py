"""Numbers of the breaker as text."""

from __future__ import annotations

import pytest

from tests.internals.engine import in_numbers


@pytest.mark.parametrize(
    ("stale", "exact", "runs", "text"),
    [
        (1, True, 1, "1 row is stale; the last run processed 5 at most, the breaker allows 0"),
        (2, True, 2, "2 rows are stale; the last 2 runs processed 5 at most, the breaker allows 0"),
        (1, False, 0, "more than 1 row is stale; no run before it has ended, the breaker allows 0"),
        (None, False, 0, "the stale rows could not be counted; no run before it has ended, the breaker allows 0"),
    ],
)
def test_one_row_and_one_run_are_singular(stale: int | None, exact: bool, runs: int, text: str) -> None:
    assert in_numbers({"stale": stale, "exact": exact, "runs": runs, "usual": 5, "allowed": 0}) == text
