"""Bar charts with axes as SVG. The values of each interval are also in a tooltip, and as text in a table."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from markupsafe import Markup, escape

from housekeeping.core.wording import format_duration
from housekeeping.sweeps.insight.trends import Interval

_SLOT: Final = 10  # units of the drawing, for one interval with its gap
_GAP: Final = 1.5
_HEIGHT: Final = 100
_STEPS: Final = 4  # lines of a grid
_MINIMUM: Final = 1.5  # height of the smallest value, so that it is visible
_OVERLAID: Final = ("longest", "mean")

#: Parts of a bar from the bottom up, with the outcomes that each one counts.
OUTCOMES: Final = {
    "done": ("done",),
    "partial": ("partial", "skipped"),
    "running": ("running",),
    "failed": ("failed", "lost_lease", "lost", "missed"),
}


@dataclass(frozen=True, slots=True)
class Plot:
    """One chart.

    Attributes:
      key: Its id in the page.
      svg: The drawing without the labels of its axes.
      ticks: Labels of the vertical axis, from the top down.
      latest: The values of the last interval as text.
    """

    key: str
    title: str
    svg: Markup
    ticks: Sequence[str]
    latest: str


def plots(found: Sequence[Interval]) -> list[Plot]:
    """Return the charts of these intervals."""
    return [
        _plot("outcomes", "Runs by outcome", found, _by_outcome, lambda each: each.runs, describe_outcomes, _number),
        _plot("rows", "Processed rows", found, _one("rows"), lambda each: each.rows, describe_rows, _number),
        _plot(
            "durations",
            "Duration of a run, mean and longest",
            found,
            _durations,
            lambda each: each.longest_s or 0.0,
            describe_durations,
            format_duration,
        ),
        _plot(
            "backlog",
            "Backlog at the end of the runs",
            found,
            _one("backlog"),
            lambda each: each.backlog or 0,
            describe_backlog,
            _number,
        ),
    ]


def describe_outcomes(interval: Interval) -> str:
    """Return the number of runs by outcome."""
    return ", ".join(f"{number:,} {name}" for name, number in sorted(interval.outcomes.items())) or "no runs"


def describe_rows(interval: Interval) -> str:
    """Return the processed rows."""
    return f"{interval.rows:,}"


def describe_durations(interval: Interval) -> str:
    """Return the mean and the longest duration."""
    if interval.longest_s is None or interval.mean_s is None:
        return "-"
    return f"mean {format_duration(interval.mean_s)}, longest {format_duration(interval.longest_s)}"


def describe_backlog(interval: Interval) -> str:
    """Return the backlog."""
    if interval.backlog is None:
        return "not counted"
    return f"{'' if interval.backlog_exact else 'at least '}{interval.backlog:,}"


#: Returns the parts of an interval's bar as pairs of class and value, from the bottom up.
_Parts = Callable[[Interval], list[tuple[str, float]]]


def _plot(
    key: str,
    title: str,
    found: Sequence[Interval],
    parts: _Parts,
    value: Callable[[Interval], float],
    describe: Callable[[Interval], str],
    label: Callable[[float], str],
) -> Plot:
    top = _round_up(max((value(each) for each in found), default=0.0), seconds=label is format_duration)
    width = _SLOT * len(found)
    grid = "".join(
        f'<line class="grid" x1="0" x2="{width}" y1="{y}" y2="{y}"/>'
        for y in (_HEIGHT * step / _STEPS for step in range(_STEPS + 1))
    )
    slots = "".join(
        _slot(place, parts(each), top, f"{name_of(each)}: {describe(each)}") for place, each in enumerate(found)
    )
    svg = (
        f'<svg class="plot" id="plot-{key}" role="img" aria-label="{escape(title)}" viewBox="0 0 {width} {_HEIGHT}" '
        f'preserveAspectRatio="none">{grid}{slots}</svg>'
    )
    ticks = [label(top * step / _STEPS) if step else "0" for step in range(_STEPS, -1, -1)]
    return Plot(key, title, Markup(svg), ticks, f"{name_of(found[-1])}: {describe(found[-1])}")


def name_of(interval: Interval) -> str:
    """Return the interval's time, to the minute."""
    return f"{interval.began_at:%a %d %b %H:%M}–{interval.ended_at:%H:%M}"


def _slot(place: int, parts: Sequence[tuple[str, float]], top: float, text: str) -> str:
    left, bars, base = place * _SLOT, "", float(_HEIGHT)
    for (name, _), height in zip(parts, _heights(parts, top), strict=True):
        # The mean lies on top of the longest duration; all other parts are stacked.
        base = (_HEIGHT if name in _OVERLAID else base) - height
        if height:
            bars += (
                f'<rect class="{name}" x="{left + _GAP / 2}" y="{base:.1f}" width="{_SLOT - _GAP}" '
                f'height="{height:.1f}"/>'
            )
    area = f'<rect class="area" x="{left}" y="0" width="{_SLOT}" height="{_HEIGHT}"/>'
    return f'<g class="slot"><title>{escape(text)}</title>{area}{bars}</g>'


def _heights(parts: Sequence[tuple[str, float]], top: float) -> list[float]:
    """Return the height of each part. Small ones are enlarged to be visible, at the cost of the largest."""
    heights = [max(_MINIMUM, _HEIGHT * value / top) if value else 0.0 for _, value in parts]
    over = sum(heights) - _HEIGHT
    if over > 0 and parts[0][0] not in _OVERLAID:
        heights[heights.index(max(heights))] -= over
    return heights


def _by_outcome(interval: Interval) -> list[tuple[str, float]]:
    return [(part, sum(interval.outcomes.get(each, 0) for each in names)) for part, names in OUTCOMES.items()]


def _durations(interval: Interval) -> list[tuple[str, float]]:
    return [("longest", interval.longest_s or 0.0), ("mean", interval.mean_s or 0.0)]


def _one(attribute: str) -> _Parts:
    return lambda interval: [("value", getattr(interval, attribute) or 0)]


def _round_up(value: float, *, seconds: bool) -> float:
    """Return the next value that a grid of four steps divides well: 4, 8, 12, 20, 40, 80 ..."""
    if value <= 0:
        return float(_STEPS)
    if not seconds and value <= _STEPS:
        return float(_STEPS)
    size = 10.0 ** math.floor(math.log10(value / _STEPS))
    return next(_STEPS * size * factor for factor in (1, 2, 2.5, 5, 10) if _STEPS * size * factor >= value * (1 - 1e-9))


def _number(value: float) -> str:
    for size, unit in ((1e9, " bn"), (1e6, " M"), (1e4, " k")):
        if value >= size:
            return f"{value / (size if unit != ' k' else 1e3):g}{unit}"
    return f"{value:,g}"
