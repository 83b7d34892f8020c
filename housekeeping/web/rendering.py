"""How pages show values: escaped, and with nothing that pretends to be something else."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any, Final

from flask import Flask
from markupsafe import Markup, escape

from housekeeping.cli.formatting import counts, length, moment
from housekeeping.core.clock import SYSTEM_CLOCK
from housekeeping.core.plural import counted
from housekeeping.core.sanitize import printable
from housekeeping.sweeps.insight.run_state import is_lost, outcome_in_words
from housekeeping.web import charts
from housekeeping.web.alert_help import topic, what_to_do

_FILTERS: Final[dict[str, Callable[..., Any]]] = {"length": length, "moment": moment, "counts": counts}


def prepare(app: Flask) -> None:
    """Give the templates what they use."""
    app.jinja_env.finalize = _visible
    app.jinja_env.filters |= _FILTERS | {
        "ago": _ago,
        "as_json": _as_json,
        "length_of": len,
        "foldable": _foldable,
    }
    app.jinja_env.globals |= {
        "runs_chart": charts.runs_chart,
        "backlog_chart": charts.backlog_chart,
        "what_to_do": what_to_do,
        "topic": topic,
        "outcome_in_words": outcome_in_words,
        "is_lost": is_lost,
        "counted": counted,
    }


def _visible(value: Any) -> Any:
    """Escaping keeps text from being markup; this keeps it from turning around or hiding what stands beside it."""
    # What is no text yet (an alarm, a value of a message) would become one after this.
    return value if isinstance(value, Markup) else printable(str(value))


def _foldable(name: str) -> Markup:
    """A name that may run on in the next line between its words, and nowhere else."""
    return Markup(re.sub(r"([._/])", r"\1<wbr>", str(escape(printable(name)))))


def _ago(value: Any, now: datetime | None = None) -> str:
    if isinstance(value, str):
        value = datetime.fromisoformat(value)
    if not isinstance(value, datetime):
        return "-"
    passed = (now or SYSTEM_CLOCK.now()) - value
    return f"{length(passed.total_seconds())} ago" if passed >= timedelta() else f"in {length(-passed.total_seconds())}"


def _as_json(value: Any) -> str:
    return json.dumps(value, default=str, ensure_ascii=False, indent=2)
