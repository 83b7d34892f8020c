from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from tests.internals.insight import (
    Progress,
    format_age,
    format_counts,
    format_progress,
    format_run_counts,
    format_value,
)
from tests.internals.sweeps import Backlog


def test_counts_are_formatted_without_zeros() -> None:
    assert format_counts({"deleted_rows": 21_200, "batches": 212, "failed": 0, "out_of_time": True}) == (
        "deleted_rows 21,200, batches 212, out_of_time"
    )
    assert format_counts({"deleted_rows": 0, "out_of_time": False}) == "nothing to do"
    assert format_counts({"blocked": 5, "details": {"dependents": {"item": {}}}}) == "blocked 5"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (21_200, "21,200"),
        (True, "yes"),
        (False, "no"),
        ({"gate": "custom"}, '{"gate": "custom"}'),
        ("2026-11", "2026-11"),
    ],
)
def test_single_count_is_formatted_by_its_type(value: Any, text: str) -> None:
    assert format_value(value) == text


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
    [(7200, "2 h ago"), (1, "just now"), (0, "just now"), (-1, "just now"), (-1.1, "in 1.1 s"), (-72_000, "in 20 h")],
)
def test_age_of_a_future_time_says_how_far_ahead_it_is(seconds: float, shown: str) -> None:
    now = datetime(2026, 1, 1, tzinfo=UTC)

    assert format_age(now - timedelta(seconds=seconds), now) == shown


@pytest.mark.parametrize(
    ("progress", "text"),
    [
        (Progress(1, 0, None, 3, 300), "0 rows"),
        (Progress(1, 1, None, 4, 300), "1 row, 0.25 rows/s"),
        (Progress(1, 0, Backlog(1), 4, 300), "0 of 1 row (0 %)"),
        (Progress(1, 0, Backlog(1_000_000), 3, 300), "0 of 1,000,000 rows (0 %)"),
        (
            Progress(1, 123_456, Backlog(1_000_000), 10, 300),
            "123,456 of 1,000,000 rows (12 %), 12,346 rows/s, 1.2 min left",
        ),
        (Progress(1, 300, Backlog(1000), 30, 60), "300 of 1,000 rows (30 %), 10 rows/s, 1.2 min left in several runs"),
        (
            Progress(1, 1000, Backlog(10_000_000, exact=False), 1, 20_000),
            "1,000 of at least 10,000,000 rows, 1,000 rows/s, over 2.8 h left",
        ),
        (Progress(1, 12, Backlog(10), 1, 60), "12 of 12 rows (100 %), 12 rows/s, 0 ms left"),
    ],
)
def test_progress_has_done_of_total_rate_and_time_left(progress: Progress, text: str) -> None:
    assert format_progress(progress) == text
