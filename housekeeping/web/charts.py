"""Small charts as SVG, drawn by the server."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from markupsafe import Markup, escape

from housekeeping.core.sanitize import printable
from housekeeping.sweeps.insight.throughput import Ended

_BAR: Final = 6  # px, of which one is the gap
_HEIGHT: Final = 40
_LEAST: Final = 3  # so that the shortest run is seen
_FOOT: Final = 7  # px under the bars, for what marks a failed one


def runs_chart(runs: Sequence[Ended], *, linked: bool = False) -> Markup:
    """A bar a run, oldest first, as high as it took long; what failed is marked by more than its colour.

    Parameters:
      linked: Whether a click on a bar leads to its run. By keyboard one goes by the table of runs, which says more:
        fifty bars would be fifty stops on the way to it.
    """
    if not runs:
        return Markup("")
    longest = max(_seconds(run) for run in runs) or 1
    bars = []
    for place, run in enumerate(runs):
        height = max(_LEAST, round(_HEIGHT * _seconds(run) / longest))
        left = place * _BAR
        mark = _mark(left) if _is_bad(run) else ""
        title = (
            f"{run.started_at:%Y-%m-%d %H:%M} {run.outcome} {run.reason or ''}: {_seconds(run):.1f} s, {run.settled:,}"
        )
        bar = (
            f'<g class="bar {escape(run.outcome)}"><title>{escape(printable(title))}</title>'
            f'<rect x="{left}" y="{_HEIGHT - height}" width="{_BAR - 1}" height="{height}"/>{mark}</g>'
        )
        bars.append(f'<a href="/runs/{run.run_id}" tabindex="-1">{bar}</a>' if linked else bar)
    failed = sum(_is_bad(run) for run in runs)
    label = f"the last {len(runs)} runs, {failed} of them failed; the longest took {longest:.1f} s"
    return _svg("".join(bars), len(runs) * _BAR, _HEIGHT + _FOOT, label, role="group" if linked else "img")


def backlog_chart(runs: Sequence[Ended], width: int = 300) -> Markup:
    """A line through what waited at the end of each run; nothing when there are too few to draw one."""
    counted = [run.backlog for run in runs if run.backlog is not None]
    if len(counted) < 2:
        return Markup("")
    most, step = max(counted) or 1, width / (len(counted) - 1)
    points = " ".join(
        f"{place * step:.1f},{_HEIGHT - (_HEIGHT - 3) * each / most - 1.5:.1f}" for place, each in enumerate(counted)
    )
    label = f"what waited at the end of the last {len(counted)} runs: at most {most:,}, now {counted[-1]:,}"
    area = f'<polygon class="area" points="0,{_HEIGHT} {points} {width},{_HEIGHT}"/>'
    return _svg(f'{area}<polyline class="line" points="{points}"/>', width, _HEIGHT, label)


def _mark(left: int) -> str:
    """A triangle under the bar, for those who do not see red."""
    top, bottom = _HEIGHT + 1.5, _HEIGHT + _FOOT - 0.5
    return f'<path class="mark" d="M{left - 0.5} {bottom}h6l-3 {top - bottom:.1f}z"/>'


def _svg(inside: str, width: int, height: int, label: str, role: str = "img") -> Markup:
    return Markup(
        f'<svg class="chart" role="{role}" aria-label="{escape(label)}" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" preserveAspectRatio="none">{inside}</svg>'
    )


def _is_bad(run: Ended) -> bool:
    return run.outcome not in ("done", "partial")


def _seconds(run: Ended) -> float:
    return (run.finished_at - run.started_at).total_seconds()
