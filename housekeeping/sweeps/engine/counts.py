"""Counts of a run: their names and order, and what a batch adds to them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from housekeeping.core.errors import DeclarationError
from housekeeping.sweeps.declaration import Sweep
from housekeeping.sweeps.ledger.runs import Counts, Outcome
from housekeeping.sweeps.stages.stage import BatchResult

#: Seconds by which this machine's clock was ahead of the database's, if that exceeded the tolerance.
CLOCK_SKEW: Final = "clock_skew_s"
#: Flags among the counts that say whether time ran out. The documents have two names for it.
_DOCUMENT_100: Final = "execution_timeout"
_TIME_FLAGS: Final = ("out_of_time", _DOCUMENT_100)


def initial_counts(sweep: Sweep) -> Counts:
    """Return all counts of the sweep at zero, in the order in which they are shown."""
    return {name: False if name in _TIME_FLAGS else 0 for name in sweep.counts}


def in_order(sweep: Sweep, counts: Counts) -> Counts:
    """Return the counts in the sweep's order, which jsonb does not keep."""
    names = dict.fromkeys((*sweep.counts, *counts))
    return {name: counts[name] for name in names if name in counts}


def added(before: Counts, result: BatchResult) -> Counts:
    """Return the counts with those of a batch added.

    Raises:
      DeclarationError: The batch has a count that the sweep does not declare.
    """
    counts = dict(before)
    for name, value in result.counts.items():
        if name not in counts:
            declared = ", ".join(before) or "none"
            raise DeclarationError(f"{name!r} is counted, but not among the sweep's counts ({declared}); add it there")
        counts[name] = counts[name] + value if isinstance(value, int) and not isinstance(value, bool) else value
    if "batches" in counts:
        counts["batches"] += any(result.counts.values())  # only a batch that changed something counts
    if result.failures:
        counts["failed"] = counts.get("failed", 0) + len(result.failures)
    return counts


def flagged(counts: Counts, verdict: tuple[Outcome, str | None], exceeded: Callable[[], bool]) -> Counts:
    """Return the counts at the end of a run, with the flags that say whether its time ran out.

    Parameters:
      exceeded: Returns whether the run's time is over, which sets `execution_timeout` even if nothing is left
        (document 100, 処理フロー 4).
    """
    flags = {flag: verdict == ("partial", "out_of_time") for flag in _TIME_FLAGS if flag in counts}
    if _DOCUMENT_100 in flags:
        flags[_DOCUMENT_100] = flags[_DOCUMENT_100] or exceeded()
    return counts | flags
