"""Scales and values of the charts."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import pytest

from tests.internals.insight import Interval, intervals
from tests.internals.web import Plot, plots

NOW = datetime(2026, 1, 1, 12, tzinfo=UTC)


@pytest.fixture
def drawn() -> Callable[..., Plot]:
    """Draw one chart, whose last interval has these values."""

    def draw(key: str, **values: Any) -> Plot:
        *others, last = intervals("hour", NOW)
        found = [*others, Interval(last.began_at, last.ended_at, **values)]
        return next(each for each in plots(found) if each.key == key)

    return draw


@pytest.mark.parametrize(
    ("highest", "ticks"),
    [
        (0, ["4", "3", "2", "1", "0"]),
        (1, ["4", "3", "2", "1", "0"]),
        (5, ["8", "6", "4", "2", "0"]),
        (1_834, ["2,000", "1,500", "1,000", "500", "0"]),
        (40_000, ["40k", "30k", "20k", "10k", "0"]),
        (1_000_001, ["2M", "1.5M", "1M", "500k", "0"]),
        (10**18, ["1e+09bn", "7.5e+08bn", "5e+08bn", "2.5e+08bn", "0"]),
    ],
)
def test_axis_has_round_values_and_contains_the_highest(
    drawn: Callable[..., Plot], highest: int, ticks: list[str]
) -> None:
    assert [each.replace(" ", "") for each in drawn("rows", rows=highest).ticks] == ticks


def test_axis_of_durations_has_units(drawn: Callable[..., Plot]) -> None:
    chart = drawn("durations", outcomes={"done": 2}, total_s=90.0, longest_s=61.0)

    assert chart.ticks == ["1.3 min", "1 min", "40 s", "20 s", "0"]
    assert chart.latest.endswith("mean 45 s, longest 1 min")


def test_parts_of_a_bar_are_stacked_in_a_fixed_order(drawn: Callable[..., Plot]) -> None:
    chart = drawn("outcomes", outcomes={"done": 5, "skipped": 1, "failed": 1, "lost": 1, "running": 2})

    parts = re.findall(r'<rect class="(\w+)" x="590.75" y="([\d.]+)"', chart.svg)
    assert [name for name, _ in parts] == ["done", "partial", "running", "failed"]
    assert [float(y) for _, y in parts] == sorted((float(y) for _, y in parts), reverse=True)


@pytest.mark.parametrize("done", [1_999, 100_000])
def test_small_value_on_a_large_one_is_visible(drawn: Callable[..., Plot], done: int) -> None:
    chart = drawn("outcomes", outcomes={"done": done, "failed": 1})

    [(top, height)] = re.findall(r'<rect class="failed"[^>]* y="([\d.-]+)"[^>]* height="([\d.]+)"', chart.svg)
    assert float(top) >= 0 and float(height) >= 1
