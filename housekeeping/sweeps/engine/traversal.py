"""State of a run between two batches: where it is in its stages, what it has counted, and how it ends.

A place becomes the cursor from which the next run resumes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from housekeeping.sweeps.ledger.runs import Counts, Cursor, Outcome
from housekeeping.sweeps.stages.stage import BatchResult, Position, Stage, as_cursor
from housekeeping.sweeps.stages.table_stage import TableStage

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
class Place:
    """Where the next batch begins.

    Attributes:
      stage: The number of the stage.
      after: The position in that stage; None for its front.
      until: Stage and position at which a resumed run ends after it has started again at the front; None before that.
    """

    stage: int = 0
    after: Position | None = None
    until: tuple[int, Position | None] | None = None

    @property
    def stage_end(self) -> Position | None:
        """Last position of this stage, for a resumed run that started again at the front; otherwise None."""
        return self.until[1] if self.until is not None and self.until[0] == self.stage else None


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


class Traversal:
    """Stages of a run in order.

    A resumed run that comes to the end starts again at the front, and ends where it began.

    Parameters:
      cursor: Where an earlier run stopped, from its row in the ledger; None to start at the front.
    """

    def __init__(self, stages: Sequence[Stage], cursor: Cursor | None) -> None:
        self.stages = stages
        self.start = self._place_of(cursor)

    def next(self, place: Place, result: BatchResult, *, may_restart: bool) -> Place | None:
        """Return where the run continues after a batch; None at the end.

        Parameters:
          may_restart: False for a run that has left a stage early: the next run must resume where it was left.
        """
        if not result.exhausted:
            return replace(place, after=result.position)
        until = place.until
        last = len(self.stages) - 1 if until is None else until[0] - (until[1] is None)
        if place.stage < last:
            return replace(place, stage=place.stage + 1, after=None)
        if self.is_resumed and until is None and may_restart and self.can_restart():
            return Place(until=(self.start.stage, self.start.after))
        return None

    @property
    def is_resumed(self) -> bool:
        return (self.start.stage, self.start.after) != (0, None)

    def can_restart(self) -> bool:
        """Return whether every stage can end at a given position, as a `TableStage` can; others restart themselves."""
        return all(isinstance(each, TableStage) for each in self.stages)

    def sees_everything(self) -> bool:
        """Return whether a run that ends as ``done`` has looked at every row."""
        return not self.is_resumed or self.can_restart()

    def cursor_at(self, place: Place) -> Cursor | None:
        """Return the place as the ledger stores it; None for the front of the first stage."""
        if place.after is None and place.stage == 0:
            return None
        return {"pass": self.stages[place.stage].name, "after": as_cursor(place.after)}

    def _place_of(self, cursor: Cursor | None) -> Place:
        names = [each.name for each in self.stages]
        # A cursor of an older release may name a stage that no longer exists, or have columns of other types.
        if cursor is None or cursor["pass"] not in names:
            return Place()
        number = names.index(cursor["pass"])
        after = None if cursor["after"] is None else tuple(cursor["after"])
        stage = self.stages[number]
        if after is not None and isinstance(stage, TableStage) and not stage.is_position(after):
            return Place()
        return Place(number, after)
