"""Jinja filters and globals of the templates. Every value is escaped, and control characters are made visible."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from datetime import datetime
from typing import Any, Final

from flask import Flask
from jinja2 import StrictUndefined
from markupsafe import Markup, escape

from housekeeping.core.clock import SYSTEM_CLOCK
from housekeeping.core.sanitize import printable
from housekeeping.core.wording import counted, format_duration
from housekeeping.presentation.formatting import format_run_counts, format_time
from housekeeping.sweeps.insight.run_state import is_lost, outcome_in_words
from housekeeping.web import charts
from housekeeping.web.alert_help import help_for, topic


def configure_templates(app: Flask) -> None:
    """Register the filters and globals of the templates."""
    app.jinja_env.finalize = _visible
    app.jinja_env.undefined = StrictUndefined  # a name that no longer exists is an error, and not an empty page
    app.context_processor(lambda: {"live": False, "snapshot": None})
    app.jinja_env.filters |= _FILTERS
    app.jinja_env.globals |= {
        "runs_chart": charts.runs_chart,
        "backlog_chart": charts.backlog_chart,
        "help_for": help_for,
        "topic": topic,
        "outcome_in_words": outcome_in_words,
        "is_lost": is_lost,
        "counted": counted,
        "run_counts": format_run_counts,
    }


def _visible(value: Any) -> Any:
    """Make characters visible that reverse or hide neighboring text. Escaping alone keeps only markup out."""
    return value if isinstance(value, Markup) else printable(str(value))


def _foldable(name: str) -> Markup:
    """Return a name that may wrap only after its separators."""
    return Markup(re.sub(r"([._/])", r"\1<wbr>", str(escape(printable(name)))))


def _ago(value: Any, now: datetime | None = None) -> str:
    if isinstance(value, str):
        value = datetime.fromisoformat(value)
    if not isinstance(value, datetime):
        return "-"
    seconds = ((now or SYSTEM_CLOCK.now()) - value).total_seconds()
    return f"{format_duration(seconds)} ago" if seconds >= 0 else f"in {format_duration(-seconds)}"


def _as_json(value: Any) -> str:
    return json.dumps(value, default=str, ensure_ascii=False, indent=2)


_FILTERS: Final[dict[str, Callable[..., Any]]] = {
    "duration": format_duration,
    "time": format_time,
    "ago": _ago,
    "as_json": _as_json,
    "foldable": _foldable,
}
