"""Runs at a fixed time until nothing is left, and their counts in the ledger."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from typing import Any, Final
from uuid import uuid4

from peewee import fn

from housekeeping.core.telemetry.context import MessageContext, current_message
from housekeeping.core.wording import counted
from housekeeping.sweeps.declaration import Sweep
from housekeeping.sweeps.engine.results import RunResult
from housekeeping.sweeps.engine.runner import run_sweep
from housekeeping.sweeps.ledger.models import Run
from housekeeping.testing.clock import ManualClock

_MOST_RUNS: Final = 1_000  # more partial runs than that mean that the sweep makes no progress

#: pytest shows the line of the test instead of this module's.
__tracebackhide__: Final = True


def run_as(message_id: str, sweep: Sweep, argument: Any, now: datetime) -> RunResult:
    """Run the sweep once, as a worker would for this message."""
    token = current_message.set(MessageContext(message_id, worker=sweep.name))
    try:
        return run_sweep(sweep, argument, clock=ManualClock(now))
    finally:
        current_message.reset(token)


def run_to_the_end(sweep: Sweep, argument: Any, now: datetime, message_id: str | None = None) -> None:
    """Run the sweep until nothing is left to do.

    Parameters:
      message_id: Id of the first message; it may have been processed before.

    Raises:
      AssertionError: When a run fails.
    """
    message_id = message_id or str(uuid4())
    for _ in range(_MOST_RUNS):
        result = run_as(message_id, sweep, argument, now)
        if result.outcome == "done" or (result.outcome, result.reason) == ("skipped", "already_done"):
            return
        if result.outcome != "partial":
            raise AssertionError(f"{sweep.name}: the run ended as {result.outcome}: {result.reason}") from result.error
        message_id = str(uuid4())
    raise AssertionError(f"{sweep.name}: not done after {_MOST_RUNS:,} runs; the last one ended as {result.reason}")


def last_run() -> int:
    """Return the id of the newest run in the ledger, or 0."""
    newest: int | None = Run.select(fn.MAX(Run.id)).scalar()
    return newest or 0


def nothing_changed(sweep: Sweep, since: int) -> str:
    """Return the error message for runs after row `since` of the ledger that changed nothing."""
    failed = _summed(sweep, since, ["failed"])["failed"]
    if failed:
        why = f": {counted(failed, 'row')} failed; the log of a run_sweep(sweep) says why"
    else:
        why = "; put stale rows into its tables first"
    return f"{sweep.name} changed nothing, which proves nothing{why}"


def progress_since(sweep: Sweep, since: int) -> dict[str, int]:
    """Return the sums of the sweep's progress counts over all runs after row `since` of the ledger."""
    return _summed(sweep, since, sweep.progress_counts)


def _summed(sweep: Sweep, since: int, names: Iterable[str]) -> dict[str, int]:
    rows: Any = Run.select(Run.counts).where((Run.worker == sweep.name) & (Run.id > since)).tuples()
    found = [counts for (counts,) in rows]
    return {name: sum(counts.get(name, 0) for counts in found) for name in names}
