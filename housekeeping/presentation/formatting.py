"""Counts, times, overrides and requeued messages as text."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final

from housekeeping.core.sanitize import in_one_line
from housekeeping.core.wording import counted, format_duration
from housekeeping.sweeps.ledger.overrides import describe_override as describe_override
from housekeeping.sweeps.ledger.runs import PURGE, RESTORE
from housekeeping.sweeps.stages.stage import Backlog

if TYPE_CHECKING:
    from housekeeping.brokers.dead_letters import LetterResult
    from housekeeping.sweeps.insight.run_progress import Progress
    from housekeeping.sweeps.insight.status import WorkerStatus


_DETAIL_WIDTH: Final = 200  # characters
#: Seconds by which two clocks differ; a time so far ahead is not shown as future.
_CLOCK_NOISE: Final = 1


def format_counts(counts: dict[str, Any]) -> str:
    """Return a run's counts in one line, without those that are zero."""
    return ", ".join(_count(name, value) for name, value in _shown(counts).items()) or "nothing to do"


def format_run_counts(outcome: str | None, counts: dict[str, Any]) -> str:
    """Return a run's counts in one line; ``-`` if they are zero and the run did not end as done or partial."""
    return format_counts(counts) if outcome in ("done", "partial") or _shown(counts) else "-"


def format_value(value: Any) -> str:
    """Return one count of a run: ``21,200``, ``yes`` or ``no``, details as JSON."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int | float):
        return f"{value:,}"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def _shown(counts: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in counts.items() if value and name not in (PURGE, RESTORE)}


def _count(name: str, value: Any) -> str:
    if isinstance(value, bool | dict):  # the engine's own counts carry details, which the alerts show
        return name
    # A user's own stage may store something other than a number as a count.
    return f"{name} {value:,}" if isinstance(value, int | float) else f"{name} {value}"


def format_progress(progress: Progress) -> str:
    """Return the progress of a run in one line: ``1,500 of 10,000 rows (15 %), 500 rows/s, 17 s left``."""
    parts = [_done_of_total(progress)]
    if (rows_per_s := progress.rows_per_s) is not None:
        parts.append(f"{rows_per_s:,.0f} rows/s" if rows_per_s >= 1 else f"{rows_per_s:.2g} rows/s")
    if (left_s := progress.left_s) is not None and progress.total is not None:
        over = "" if progress.total.exact else "over "
        runs = " in several runs" if progress.needs_more_runs else ""
        parts.append(f"{over}{format_duration(left_s)} left{runs}")
    return ", ".join(parts)


def _done_of_total(progress: Progress) -> str:
    if progress.total is None:
        return counted(progress.done, "row")
    # More rows may become stale during the run.
    total = replace(progress.total, rows=max(progress.total.rows, progress.done))
    share = "" if progress.share is None else f" ({int(100 * progress.share)} %)"
    return f"{progress.done:,} of {total} {'row' if total == Backlog(1) else 'rows'}{share}"


def format_time(value: datetime | None, form: str = "%Y-%m-%d %H:%M:%S") -> str:
    """Return a time in UTC, to the second by default, or ``-`` for `None`."""
    return "-" if value is None else value.strftime(form)


def describe_requeue(result: LetterResult) -> str:
    """Return what happened to a dead letter that was to be requeued or deleted."""
    match result.outcome:
        case "requeued" | "deleted":
            return result.outcome
        case "duplicate":
            return f"kept: duplicate of {in_one_line(result.detail or 'a live message', _DETAIL_WIDTH)}"
        case "refused":
            return f"kept: it cannot be sent: {in_one_line(result.detail or '', _DETAIL_WIDTH)}"
        case _:
            return "already requeued or deleted"


def format_backlog(status: WorkerStatus, now: datetime) -> str:
    """Return a worker's backlog: ``5,000``, ``at least 10,000``, ``5,000 (12 min ago)`` or ``?``."""
    if status.waiting is None:
        return "?"
    return f"{status.waiting} ({format_age(status.counted_at, now)})" if status.counted_at else str(status.waiting)


def format_age(value: datetime, now: datetime) -> str:
    """Return how long ago a time was, or how far ahead it is: ``3 h ago``, ``in 20 h``."""
    seconds = (now - value).total_seconds()
    return f"in {format_duration(-seconds)}" if seconds < -_CLOCK_NOISE else f"{format_duration(seconds)} ago"
