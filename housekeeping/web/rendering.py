"""Jinja filters, globals and charts of the templates. Every value is escaped; control characters are made visible."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Any, Final

from flask import Flask
from jinja2 import StrictUndefined
from markupsafe import Markup, escape

from housekeeping.core.clock import SYSTEM_CLOCK
from housekeeping.core.sanitize import printable
from housekeeping.core.wording import counted, format_duration
from housekeeping.database.connection import database
from housekeeping.presentation.formatting import format_progress, format_run_counts, format_time, format_value
from housekeeping.sweeps.insight.backlog import Ended
from housekeeping.sweeps.insight.status import WorkerStatus, is_lost, outcome_in_words
from housekeeping.sweeps.ledger.history import run_label
from housekeeping.web.alert_groups import are_open
from housekeeping.web.alert_help import help_for, topic
from housekeeping.web.responses import static_url

_BAR: Final = 6  # px, including a gap of one
_HEIGHT: Final = 40
_MINIMUM: Final = 3  # px, so that the shortest run is visible
_FOOT: Final = 7  # px under the bars, for the marks of failed runs


def configure_templates(app: Flask) -> None:
    """Register the filters and globals of the templates."""
    app.jinja_env.finalize = _visible
    app.jinja_env.undefined = StrictUndefined  # a name that no longer exists is an error, and not an empty page
    app.context_processor(lambda: {"live": False, "snapshot": None})
    app.jinja_env.filters |= _FILTERS
    app.jinja_env.globals |= {
        "runs_chart": runs_chart,
        "backlog_chart": backlog_chart,
        "help_for": help_for,
        "topic": topic,
        "outcome_in_words": outcome_in_words,
        "is_lost": is_lost,
        "counted": counted,
        "run_counts": format_run_counts,
        "run_label": run_label,
        "progress_text": format_progress,
        "several_databases": database.several,
        "static_url": static_url,
        "alerts_are_open": are_open,
    }


def _visible(value: Any) -> Any:
    """Make characters visible that reverse or hide neighboring text. Escaping alone keeps only markup out."""
    return value if isinstance(value, Markup) else printable(str(value))


def _foldable(name: str) -> Markup:
    """Return a name that may wrap only after its separators."""
    return Markup(re.sub(r"([._/:])", r"\1<wbr>", str(escape(printable(name)))))


def _ago(value: Any, now: datetime | None = None) -> Markup:
    """Return how long ago a time was. The page's script keeps it up to date, so that it need not be sent again."""
    if isinstance(value, str):
        value = datetime.fromisoformat(value)
    if not isinstance(value, datetime):
        return Markup("-")
    seconds = ((now or SYSTEM_CLOCK.now()) - value).total_seconds()
    text = f"{format_duration(seconds)} ago" if seconds >= 0 else f"in {format_duration(-seconds)}"
    return Markup(f'<time class="ago" datetime="{value.isoformat(timespec="seconds")}">{text}</time>')


def _backlog(status: WorkerStatus, now: datetime) -> Markup:
    counted_at = status.counted_at
    return escape(status.waiting or "?") + (Markup(" (") + _ago(counted_at, now) + ")" if counted_at else "")


def _as_json(value: Any) -> str:
    return json.dumps(value, default=str, ensure_ascii=False, indent=2)


def runs_chart(runs: Sequence[Ended], *, linked_in: str | None = None) -> Markup:
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
        height = max(_MINIMUM, round(_HEIGHT * _seconds(run) / longest))
        left = place * _BAR
        mark = _mark(left) if _is_bad(run) else ""
        began = f"{run.started_at:%Y-%m-%d %H:%M}"
        title = f"{began} {run.outcome} {run.reason or ''}: {_seconds(run):.1f} s, {run.processed:,}"
        bar = (
            f'<g class="bar {escape(run.outcome)}"><title>{escape(printable(title))}</title>'
            f'<rect x="{left}" y="{_HEIGHT - height}" width="{_BAR - 1}" height="{height}"/>{mark}</g>'
        )
        link = "" if linked_in is None else f"/runs/{run_label(run.run_id, linked_in)}"
        bars.append(f'<a href="{link}" tabindex="-1">{bar}</a>' if link else bar)
    failed = sum(_is_bad(run) for run in runs)
    label = f"the last {len(runs)} runs, {failed} of them failed; longest duration {longest:.1f} s"
    return _svg("".join(bars), len(runs) * _BAR, _HEIGHT + _FOOT, label, role="img" if linked_in is None else "group")


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


_FILTERS: Final[dict[str, Callable[..., Any]]] = {
    "duration": format_duration,
    "count_value": format_value,
    "time": format_time,
    "ago": _ago,
    "as_json": _as_json,
    "backlog": _backlog,
    "foldable": _foldable,
}
