"""Runs to the end, at a time that stands still, and what the ledger says of them."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from typing import Any, Final
from uuid import uuid4

from peewee import fn

from housekeeping.core.plural import counted
from housekeeping.core.telemetry.message_context import MessageContext, current_message
from housekeeping.sweeps.declaration import Sweep
from housekeeping.sweeps.engine.results import RunResult
from housekeeping.sweeps.engine.runner import run_sweep
from housekeeping.sweeps.ledger.models import Run
from housekeeping.testing.clock import ManualClock

_MOST_RUNS: Final = 1_000  # a sweep that is cut short by its limits so often does not get anywhere

#: pytest shows the line of the test, not those of this module.
__tracebackhide__: Final = True


def run_as(message_id: str, sweep: Sweep, argument: Any, now: datetime) -> RunResult:
    """One run, as if a worker had been given this message."""
    token = current_message.set(MessageContext(message_id, worker=sweep.name))
    try:
        return run_sweep(sweep, argument, clock=ManualClock(now))
    finally:
        current_message.reset(token)


def run_to_the_end(sweep: Sweep, argument: Any, now: datetime, message_id: str | None = None) -> None:
    """Run until nothing is left to do.

    Parameters:
      message_id: Of the message that is delivered first; it may be one that was done before.

    Raises:
      AssertionError: When a run does not end well.
    """
    message_id = message_id or str(uuid4())
    for _ in range(_MOST_RUNS):
        result = run_as(message_id, sweep, argument, now)
        if result.outcome == "done" or (result.outcome, result.reason) == ("skipped", "already_done"):
            return
        if result.outcome != "partial":
            raise AssertionError(f"{sweep.name}: the run ended as {result.outcome}: {result.reason}") from result.error
        message_id = str(uuid4())
    raise AssertionError(f"{sweep.name}: {_MOST_RUNS:,} runs did not come to an end; the last is {result.reason}")


def last_run() -> int:
    """The id of the newest row of the ledger; 0: there is none."""
    newest: int | None = Run.select(fn.MAX(Run.id)).scalar()
    return newest or 0


def nothing_to_do(sweep: Sweep, since: int) -> str:
    """Why runs that changed nothing, those after row `since` of the ledger, prove nothing, and the way out."""
    failed = _summed(sweep, since, ["failed"])["failed"]
    if failed:
        why = f": {counted(failed, 'row')} could not be settled; the log of a run_sweep(sweep) says why"
    else:
        why = "; put stale rows into its tables first"
    return f"{sweep.name} changed nothing, which proves nothing{why}"


def totals(sweep: Sweep, since: int) -> dict[str, int]:
    """What the ledger counts as settled, all runs of the sweep after row `since` together."""
    return _summed(sweep, since, sweep.progress_counts)


def _summed(sweep: Sweep, since: int, names: Iterable[str]) -> dict[str, int]:
    rows: Any = Run.select(Run.counts).where((Run.worker == sweep.name) & (Run.id > since)).tuples()
    found = [counts for (counts,) in rows]
    return {name: sum(counts.get(name, 0) for counts in found) for name in names}
