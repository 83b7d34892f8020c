"""Default delays of retries."""

from __future__ import annotations

from datetime import timedelta

import pytest

from tests.internals.middleware import MAX_RETRIES, delay_before


@pytest.mark.parametrize(
    ("retry", "least", "most"),
    [(0, 15, 24), (1, 16, 34), (2, 31, 58), (10, 10_015, 10_114), (24, 331_791, 332_016)],
)
def test_delay_grows_with_the_fourth_power(retry: int, least: int, most: int) -> None:  # R1
    assert delay_before(retry, lambda low, high: low) == timedelta(seconds=least)
    assert delay_before(retry, lambda low, high: high) == timedelta(seconds=most)


def test_twenty_five_retries_take_about_three_weeks() -> None:  # R1
    together = sum((delay_before(retry, lambda low, high: low) for retry in range(MAX_RETRIES)), timedelta())

    assert timedelta(days=20) < together < timedelta(days=21)


def test_every_delay_is_within_the_brokers_limits() -> None:
    assert delay_before(MAX_RETRIES - 1, lambda low, high: high) < timedelta(days=7)
    assert delay_before(10_000) == timedelta(days=7)  # with `max_retries=None`
