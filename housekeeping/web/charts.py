"""Small charts as SVG, drawn by the server."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from markupsafe import Markup, escape

from housekeeping.sweeps.rates import Ended

_BAR: Final = 6  # px, of which one is the gap
_HEIGHT: Final = 40
_LEAST: Final = 3  # so that the shortest run is seen


def runs_chart(runs: Sequence[Ended]) -> Markup:
    """A bar a run, oldest first, as high as it took long; what failed is marked by more than its colour."""
    longest = max((_seconds(run) for run in runs), default=0) or 1
    if not runs:
        return Markup("")
    bars = []
    for place, run in enumerate(runs):
        height = max(_LEAST, round(_HEIGHT * _seconds(run) / longest))
        bad = run.outcome not in ("done", "partial")
        title = (
            f"{run.started_at:%Y-%m-%d %H:%M} {run.outcome} {run.reason or ''}: {_seconds(run):.1f} s, {run.settled:,}"
        )
        mark = f'<text x="{place * _BAR + 2.5}" y="{_HEIGHT - 1}" class="mark">!</text>' if bad else ""
        bars.append(
            f'<a href="/runs/{run.run_id}"><g class="bar {escape(run.outcome)}"><title>{escape(title)}</title>'
            f'<rect x="{place * _BAR}" y="{_HEIGHT - height}" width="{_BAR - 1}" height="{height}"/>{mark}</g></a>'
        )
    failed = sum(run.outcome not in ("done", "partial") for run in runs)
    label = f"the last {len(runs)} runs, {failed} of them failed; the longest took {longest:.1f} s"
    return _svg("".join(bars), max(1, len(runs)) * _BAR, label)


def backlog_chart(runs: Sequence[Ended]) -> Markup:
    """A line through what waited at the end of each run."""
    counted = [run.backlog for run in runs if run.backlog is not None]
    if len(counted) < 2:
        return Markup("")
    most = max(counted) or 1
    points = " ".join(
        f"{place * _BAR},{_HEIGHT - round((_HEIGHT - 2) * each / most) - 1}" for place, each in enumerate(counted)
    )
    label = f"what waited at the end of the last {len(counted)} runs: at most {most:,}, now {counted[-1]:,}"
    return _svg(f'<polyline class="line" points="{points}"/>', (len(counted) - 1) * _BAR, label)


def _svg(inside: str, width: int, label: str) -> Markup:
    return Markup(
        f'<svg class="chart" role="img" aria-label="{escape(label)}" width="{width}" height="{_HEIGHT}" '
        f'viewBox="0 0 {width} {_HEIGHT}">{inside}</svg>'
    )


def _seconds(run: Ended) -> float:
    return (run.finished_at - run.started_at).total_seconds()
