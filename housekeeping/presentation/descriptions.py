"""One-line descriptions of a worker's override and of a requeued message."""

from __future__ import annotations

from typing import Final

from housekeeping.brokers.dead_letters import Requeued
from housekeeping.core.sanitize import in_one_line
from housekeeping.core.wording import counted, format_duration
from housekeeping.presentation.formatting import format_time
from housekeeping.sweeps.ledger.overrides import Override

_DETAIL_WIDTH: Final = 200  # characters


def describe_override(override: Override) -> str:
    """Return which override is in force, until when and why."""
    limits = [
        *([f"{counted(override.batch_size, 'record')} a batch"] if override.batch_size else []),
        *([f"{format_duration(override.max_runtime.total_seconds())} a run"] if override.max_runtime else []),
    ]
    state = f"narrowed to {' and '.join(limits)}" if limits else override.state
    ends = f"until {format_time(override.until)} UTC" if override.until else "until it is resumed"
    return f"{override.worker} is {state} {ends}" + (f": {override.reason}" if override.reason else "")


def describe_requeue(result: Requeued) -> str:
    """Return what happened to a dead letter that was requeued."""
    match result.outcome:
        case "requeued":
            return "requeued"
        case "duplicate":
            return f"kept: duplicate of {in_one_line(result.detail or 'a live message', _DETAIL_WIDTH)}"
        case "refused":
            return f"kept: it cannot be sent: {in_one_line(result.detail or '', _DETAIL_WIDTH)}"
        case _:
            return "already requeued"
