"""Small SVG charts, rendered on the server."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from markupsafe import Markup, escape

from housekeeping.core.sanitize import printable
from housekeeping.sweeps.insight.throughput import Ended

_BAR: Final = 6  # px, including a gap of one
_HEIGHT: Final = 40
_MINIMUM: Final = 3  # px, so that the shortest run is visible
_FOOT: Final = 7  # px under the bars, for the marks of failed runs


def runs_chart(runs: Sequence[Ended], *, linked: bool = False) -> Markup:
    """Return a bar per run, oldest first, with its duration as height and a mark under failed runs.

    Parameters:
      linked: Whether a click on a bar opens its run. The bars are not reachable by keyboard: fifty of them would come
        before the table of runs, which has the same links.
    """
    if not runs:
        return Markup("")
    longest = max(_seconds(run) for run in runs) or 1
    bars = []
    for place, run in enumerate(runs):
        height = max(_MINIMUM, round(_HEIGHT * _seconds(run) / longest))
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
    label = f"the last {len(runs)} runs, {failed} of them failed; longest duration {longest:.1f} s"
    return _svg("".join(bars), len(runs) * _BAR, _HEIGHT + _FOOT, label, role="group" if linked else "img")


def backlog_chart(runs: Sequence[Ended], width: int = 300) -> Markup:
    """Return a line through the backlog at the end of each run, or nothing for fewer than two runs."""
    backlogs = [run.backlog for run in runs if run.backlog is not None]
    if len(backlogs) < 2:
        return Markup("")
    highest, step = max(backlogs) or 1, width / (len(backlogs) - 1)
    points = " ".join(
        f"{place * step:.1f},{_HEIGHT - (_HEIGHT - 3) * each / highest - 1.5:.1f}"
        for place, each in enumerate(backlogs)
    )
    label = f"backlog at the end of the last {len(backlogs)} runs: at most {highest:,}, now {backlogs[-1]:,}"
    area = f'<polygon class="area" points="0,{_HEIGHT} {points} {width},{_HEIGHT}"/>'
    return _svg(f'{area}<polyline class="line" points="{points}"/>', width, _HEIGHT, label)


def _mark(left: int) -> str:
    """Return a triangle under the bar, which does not depend on color vision."""
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
