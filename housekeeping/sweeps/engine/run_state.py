"""State of a run between two batches, and how a run ends."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from housekeeping.sweeps.engine.traversal import Place
from housekeeping.sweeps.ledger.runs import Counts, Outcome

#: How a run ends: outcome and reason.
Verdict = tuple[Outcome, str | None]
DONE: Final[Verdict] = ("done", None)
PAUSED: Final[Verdict] = ("partial", "paused")
SHUTDOWN: Final[Verdict] = ("partial", "shutdown")
OUT_OF_TIME: Final[Verdict] = ("partial", "out_of_time")
THROTTLED: Final[Verdict] = ("partial", "gate")
#: Verdicts of a run that was stopped. It does not fail with a pending error, because the next run meets it as well.
STOPPED: Final = (SHUTDOWN, PAUSED)


@dataclass(frozen=True, slots=True)
class RunState:
    """State of a run between two batches.

    Attributes:
      counts: What the run has counted.
      place: Where the next batch begins.
      verdict: How the run ends; None while it continues.
    """

    counts: Counts
    place: Place
    verdict: Verdict | None = None
