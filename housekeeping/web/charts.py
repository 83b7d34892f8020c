"""Charts as SVG, of all runs over time and of a worker's last runs, and the page of what the library costs PostgreSQL.

The page shows runs by outcome, rows, durations and backlogs. The values of each interval are also in a tooltip, and as
text in a table. The charts refresh themselves for every viewer from one cache.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final

from flask import Flask, abort, render_template, request, url_for
from markupsafe import Markup, escape

from housekeeping.core.clock import SYSTEM_CLOCK, Clock
from housekeeping.core.logs import error_line, format_duration, printable
from housekeeping.core.logs import logger as named_logger
from housekeeping.core.settings import Settings
from housekeeping.database.connection import close_databases, database
from housekeeping.doctor import CONNECTION, examine
from housekeeping.erasures import subjects_of
from housekeeping.insight.coverage import read_coverage
from housekeeping.insight.load import read_loads
from housekeeping.insight.trends import INTERVALS, Interval, Range, Trends, processed_by, read_trends
from housekeeping.ledger.history import RunRecord
from housekeeping.ledger.schema import run_label
from housekeeping.sweeps.declaration import Sweep
from housekeeping.sweeps.values import Finding
from housekeeping.web.snapshot import Cache, SnapshotCache
from housekeeping.workers import kept_tables

logger = named_logger(__name__)

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


#: Returns the value of an interval, by which the axis is chosen, or that value as text.
_Value = Callable[[Interval], float]
_Text = Callable[[Interval], str]
#: Returns the parts of an interval's bar as pairs of class and value, from the bottom up.
_Parts = Callable[[Interval], list[tuple[str, float]]]


@dataclass(frozen=True, slots=True)
class Plot:
    """One chart.

    Attributes:
      key: Its id in the page.
      svg: The drawing without the labels of its axes.
      ticks: Labels of the vertical axis, from the top down.
      texts: The values of each interval as text.
      latest: Those of the last one, with its time.
    """

    key: str
    title: str
    svg: Markup
    ticks: Sequence[str]
    texts: Sequence[str]
    latest: str


def plots(found: Sequence[Interval]) -> list[Plot]:
    """Return the charts of these intervals."""

    def plot(
        key: str, title: str, value: _Value, describe: _Text, parts: _Parts | None = None, *, in_seconds: bool = False
    ) -> Plot:
        return _plot(key, title, found, value, describe, parts or (lambda each: [("value", value(each))]), in_seconds)

    return [
        plot("outcomes", "Runs by outcome", lambda each: each.runs, _outcomes, _by_outcome),
        plot("rows", "Processed rows", lambda each: each.rows, lambda each: f"{each.rows:,}"),
        plot(
            "durations",
            "Duration of a run, mean and longest",
            lambda each: each.longest_s or 0.0,
            _mean,
            _durations,
            in_seconds=True,
        ),
        plot("backlog", "Backlog at the end of the runs", lambda each: each.backlog or 0, _backlog),
    ]


def _outcomes(interval: Interval) -> str:
    return ", ".join(f"{number:,} {name}" for name, number in sorted(interval.outcomes.items())) or "no runs"


def _mean(interval: Interval) -> str:
    if interval.longest_s is None or interval.mean_s is None:
        return "-"
    return f"mean {format_duration(interval.mean_s)}, longest {format_duration(interval.longest_s)}"


def _backlog(interval: Interval) -> str:
    if interval.backlog is None:
        return "not counted"
    return f"{'' if interval.backlog_exact else 'at least '}{interval.backlog:,}"


def _plot(
    key: str, title: str, found: Sequence[Interval], value: _Value, describe: _Text, parts: _Parts, in_seconds: bool
) -> Plot:
    texts = [describe(each) for each in found]
    label = format_duration if in_seconds else _number
    top = _round_up(max((value(each) for each in found), default=0.0), seconds=in_seconds)
    width = _SLOT * len(found)
    grid = "".join(
        f'<line class="grid" x1="0" x2="{width}" y1="{y}" y2="{y}"/>'
        for y in (_HEIGHT * step / _STEPS for step in range(_STEPS + 1))
    )
    named = [f"{name_of(each)}: {text}" for each, text in zip(found, texts, strict=True)]
    slots = "".join(_slot(place, parts(each), top, named[place]) for place, each in enumerate(found))
    svg = (
        f'<svg class="plot" id="plot-{key}" role="img" aria-label="{escape(title)}" viewBox="0 0 {width} {_HEIGHT}" '
        f'preserveAspectRatio="none">{grid}{slots}</svg>'
    )
    ticks = [label(top * step / _STEPS) if step else "0" for step in range(_STEPS, -1, -1)]
    return Plot(key, title, Markup(svg), ticks, texts, named[-1])


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


#: Trends are read so often within an interval: those of an hour every second, those of a week every three minutes.
_READS: Final = 60


class TrendCache:
    """Cache of the trends of each range and worker. Thread-safe."""

    def __init__(self, sweeps: dict[str, Sweep], clock: Clock = SYSTEM_CLOCK) -> None:
        self._sweeps = sweeps
        self._clock = clock
        self._cache = Cache(clock)

    def read(self, length: Range, worker: str | None) -> Trends:
        """Return the trends of a worker, or of all workers if it is None. Old ones are read again.

        Trends that lack a database are not kept, so that it is back as soon as it answers.
        """
        sweep = self._sweeps.get(worker or "")
        names = tuple(database.by_name()) if sweep is None else (sweep.database,)
        return self._cache.get(
            (length, worker),
            INTERVALS[length][0].total_seconds() / _READS,
            lambda: read_trends(names, self._sweeps.values(), length, self._clock.now(), worker),
            lambda trends: not trends.unavailable,
        )


_LOAD_KEPT_S: Final = 5.0  # seconds for which the load is kept for all readers
_EXAMINED_EVERY: Final = timedelta(minutes=10)  # the checks of all workers' tables take seconds
_PATIENCE_S: Final = 2.0  # maximum wait of a page for the first findings


class FindingsCache:
    """Cache of the findings of ``housekeeping doctor`` about the databases. Thread-safe.

    Attributes:
      examined_at: End of the last examination; None before the first one.
      found: When each finding was first found, by this process.
    """

    def __init__(self, settings: Settings, sweeps: dict[str, Sweep], clock: Clock = SYSTEM_CLOCK) -> None:
        self._settings = settings
        self._sweeps = sweeps
        self._clock = clock
        self._lock = threading.Lock()
        self._reading: threading.Thread | None = None
        self._until = -math.inf
        self.examined_at: datetime | None = None
        self.found: Mapping[Finding, datetime] = {}

    def refresh(self) -> None:
        """Examine the databases in the background, at most every ten minutes. Wait a moment for the first findings."""
        with self._lock:
            if self._reading is None and self._clock.monotonic() >= self._until:
                self._reading = threading.Thread(target=self._examine, name="housekeeping-doctor", daemon=True)
                self._reading.start()
            reading = self._reading
        if reading is not None and self.examined_at is None:
            reading.join(_PATIENCE_S)

    def _examine(self) -> None:
        try:
            found = [
                each for each in examine(self._settings, self._sweeps, only_databases=True) if each.level != "fine"
            ]
            now, before = self._clock.now(), self.found
            current = {each: before.get(each, now) for each in found}
            # The earlier findings of an unavailable database stay.
            is_read = all(each.subject != CONNECTION for each in found)
            self.found = current if is_read else {**before, **current}
            self.examined_at = now
        except Exception as error:  # a check of a custom sweep may raise anything; retried later
            logger.warning("The databases could not be examined", error=error_line(error))
        finally:
            close_databases()
            with self._lock:
                self._reading, self._until = None, self._clock.monotonic() + _EXAMINED_EVERY.total_seconds()


def add_database(app: Flask, snapshots: SnapshotCache) -> None:
    """Register the page."""
    cache, findings = Cache(), FindingsCache(snapshots.settings, snapshots.sweeps)

    @app.get("/database")
    def load() -> str:
        findings.refresh()
        loads = cache.get("loads", _LOAD_KEPT_S, lambda: read_loads(snapshots.sweeps.values()))
        return render_template("database.html", loads=loads, findings=findings, sweeps=snapshots.sweeps)


_COVERAGE_KEPT_S: Final = 10.0


def add_coverage(app: Flask, snapshots: SnapshotCache) -> None:
    """Register the page."""
    cache, kept = Cache(), kept_tables(snapshots.settings)
    subjects = subjects_of(snapshots.settings).values()

    @app.get("/coverage")
    def coverage() -> str:
        sweeps = snapshots.sweeps.values()
        found = cache.get("coverage", _COVERAGE_KEPT_S, lambda: read_coverage(sweeps, kept, subjects))
        return render_template("coverage.html", coverage=found, workers_by_name=snapshots.sweeps)


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
        drawn = plots(trends.intervals)
        return render_template(
            "charts.html",
            worker=worker,
            workers=sorted(snapshots.sweeps),
            length=length,
            lengths=list(INTERVALS),
            width_s=INTERVALS[length][0].total_seconds(),
            plots=drawn,
            labels=_labels(trends.intervals, length),
            table=list(zip(trends.intervals, *(each.texts for each in drawn), strict=True))[::-1],
            name_of=name_of,
            unavailable=trends.unavailable,
            now=trends.at,
            live=True,
        )


def _labels(found: Sequence[Interval], length: Range) -> list[str]:
    """Return the labels of the axis of time at equal distances, the first and the last one at its ends."""
    ends = [found[0].began_at, *(each.ended_at for each in found)]
    return [f"{ends[place * (len(ends) - 1) // _LABELS]:{_FORMS[length]}}" for place in range(_LABELS + 1)]


_BAR: Final = 6  # px, including a gap of one
_SMALL_HEIGHT: Final = 40
_SMALL_MINIMUM: Final = 3  # px, so that the shortest run is visible
_FOOT: Final = 7  # px under the bars, for the marks of failed runs


def runs_chart(sweeps: Mapping[str, Sweep], runs: Sequence[RunRecord], *, linked_in: str | None = None) -> Markup:
    """Return a bar per run, oldest first, with its duration as height and a mark under failed runs.

    Parameters:
      linked_in: Name of the runs' database, if a click on a bar opens its run. The bars are not reachable by keyboard:
        fifty of them would come before the table of runs, which has the same links.
    """
    if not runs:
        return Markup("")
    longest = max(_seconds(run) for run in runs) or 1
    bars = []
    for place, run in enumerate(runs):
        height = max(_SMALL_MINIMUM, round(_SMALL_HEIGHT * _seconds(run) / longest))
        left = place * _BAR
        mark = _mark(left) if _is_bad(run) else ""
        processed = processed_by(sweeps[run.worker], [run])
        began = f"{run.started_at:%Y-%m-%d %H:%M}"
        title = f"{began} {run.outcome} {run.reason or ''}: {_seconds(run):.1f} s, {processed:,}"
        bar = (
            f'<g class="bar {escape(run.outcome)}"><title>{escape(printable(title))}</title>'
            f'<rect x="{left}" y="{_SMALL_HEIGHT - height}" width="{_BAR - 1}" height="{height}"/>{mark}</g>'
        )
        link = "" if linked_in is None else url_for("run", label=run_label(run.run_id, linked_in))
        bars.append(f'<a href="{link}" tabindex="-1">{bar}</a>' if link else bar)
    failed = sum(_is_bad(run) for run in runs)
    label = f"the last {len(runs)} runs, {failed} of them failed; longest duration {longest:.1f} s"
    return _svg(
        "".join(bars), len(runs) * _BAR, _SMALL_HEIGHT + _FOOT, label, role="img" if linked_in is None else "group"
    )


def backlog_chart(runs: Sequence[RunRecord], width: int = 300) -> Markup:
    """Return a line through the backlog at the end of each run, or nothing for fewer than two runs or only zeros."""
    backlogs = [run.backlog for run in runs if run.backlog is not None]
    if len(backlogs) < 2 or not any(backlogs):
        return Markup("")
    highest, step = max(backlogs), width / (len(backlogs) - 1)
    points = " ".join(
        f"{place * step:.1f},{_SMALL_HEIGHT - (_SMALL_HEIGHT - 3) * each / highest - 1.5:.1f}"
        for place, each in enumerate(backlogs)
    )
    label = f"backlog at the end of the last {len(backlogs)} runs: at most {highest:,}, now {backlogs[-1]:,}"
    area = f'<polygon class="area" points="0,{_SMALL_HEIGHT} {points} {width},{_SMALL_HEIGHT}"/>'
    return _svg(f'{area}<polyline class="line" points="{points}"/>', width, _SMALL_HEIGHT, label)


def _mark(left: int) -> str:
    """Return a triangle under the bar, which does not depend on color vision."""
    top, bottom = _SMALL_HEIGHT + 1.5, _SMALL_HEIGHT + _FOOT - 0.5
    return f'<path class="mark" d="M{left - 0.5} {bottom}h6l-3 {top - bottom:.1f}z"/>'


def _svg(inside: str, width: int, height: int, label: str, role: str = "img") -> Markup:
    return Markup(
        f'<svg class="chart" role="{role}" aria-label="{escape(label)}" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" preserveAspectRatio="none">{inside}</svg>'
    )


def _is_bad(run: RunRecord) -> bool:
    return run.outcome not in ("done", "partial")


def _seconds(run: RunRecord) -> float:
    return run.duration_s or 0.0
