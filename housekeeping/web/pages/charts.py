"""Page of the charts: runs by outcome, rows, durations and backlogs over time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from flask import Flask, abort, render_template, request

from housekeeping.sweeps.insight.trends import INTERVALS, Interval, Range
from housekeeping.web.pages import plots
from housekeeping.web.snapshot import SnapshotCache
from housekeeping.web.trend_cache import TrendCache

_LONGEST: Final = 200  # characters of a worker's name
_LABELS: Final = 6  # on the axis of time
_FORMS: Final[dict[Range, str]] = {"hour": "%H:%M", "day": "%H:%M", "week": "%a %d %b"}


def add_charts(app: Flask, snapshots: SnapshotCache) -> None:
    """Register the page."""
    cache = TrendCache(snapshots.sweeps)

    @app.get("/charts")
    def charts() -> str:
        given = request.args.get("range", "day")
        length = next((each for each in INTERVALS if each == given), None)
        if length is None:
            abort(400, f"range is {given[:20]!r}; it should be one of {', '.join(INTERVALS)}")
        worker = request.args.get("worker", "").replace("\0", "").strip()[:_LONGEST] or None
        trends = cache.read(length, worker)
        return render_template(
            "charts.html",
            worker=worker,
            workers=sorted(snapshots.sweeps),
            length=length,
            lengths=list(INTERVALS),
            width_s=INTERVALS[length][0].total_seconds(),
            plots=plots.plots(trends.intervals),
            labels=_labels(trends.intervals, length),
            table=trends.intervals[::-1],
            shown=plots,
            unavailable=trends.unavailable,
            now=trends.at,
            live=True,
        )


def _labels(found: Sequence[Interval], length: Range) -> list[str]:
    """Return the labels of the axis of time at equal distances, the first and the last one at its ends."""
    ends = [found[0].began_at, *(each.ended_at for each in found)]
    return [f"{ends[place * (len(ends) - 1) // _LABELS]:{_FORMS[length]}}" for place in range(_LABELS + 1)]
