"""In which steps a run goes on: its own, smaller ones that an operator asked for, or those that take a given time."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Final

from housekeeping.core.clock import Clock, RunBudget
from housekeeping.sweeps.ledger.overrides import Override
from housekeeping.sweeps.stages.stage import Resizable, Stage
from housekeeping.sweeps.stages.table_stage import TableStage

#: A batch that adapts is a tenth of its full size at the least, and grows by a tenth at a time.
_PARTS: Final = 10
#: How long a batch should take after one has timed out, where no target is set.
_SHRUNK_TARGET: Final = timedelta(seconds=2)


class BatchSizer:
    """The size of a run's next batch, and whether there is to be one.

    A batch that took longer than its target halves the next one, any other lets it grow by a tenth of the full size:
    it comes down at once when the database is slow, and goes up carefully.

    Parameters:
      passes: The run's passes, in their own sizes: none is ever exceeded.
      target: How long a batch should take; null: batches of one size. Only passes through tables follow it.
      heeds_pause: False for a run that was forced.
    """

    def __init__(
        self,
        passes: Sequence[Stage],
        target: timedelta | None,
        budget: RunBudget,
        clock: Clock,
        *,
        heeds_pause: bool = True,
    ) -> None:
        self._own = [each.batch_size for each in passes]
        self._adapted = list(self._own)
        self._target = target
        self._budget = budget
        self._clock = clock
        self._heeds_pause = heeds_pause
        self._most: int | None = None
        self._resized: dict[tuple[int, int], Stage] = {}  # a pass keeps what it has put together for its batches
        self._shrunk: set[int] = set()
        self.paused = False

    def heed(self, said: Override | None) -> None:
        """Follow what operators say of the worker now; None: nothing, so that it goes by its own limits again."""
        narrow = said if said is not None and said.state == "narrow" else None
        self.paused = self._heeds_pause and said is not None and said.state == "paused"
        self._most = narrow.batch_size if narrow else None
        self._budget.narrow(narrow.max_runtime if narrow else None)

    def sized(self, place: int, walk: Stage, most: int | None = None) -> Stage:
        """The pass of this number with the batch that is due; one that knows no smaller steps stays as it is.

        Parameters:
          most: The rows that the breaker still allows; None: any number.
        """
        size = min(self._adapted[place], self._most or self._own[place], most or self._own[place])
        if size == walk.batch_size:
            return walk
        if isinstance(walk, Resizable):
            return walk.resized(size)  # asked each time: it may be this very pass, with another size by now
        if (place, size) not in self._resized:
            self._resized[place, size] = self._with_batches_of(size, walk)
        return self._resized[place, size]

    @staticmethod
    def _with_batches_of(size: int, walk: Stage) -> Stage:
        kind: Any = walk
        if not dataclasses.is_dataclass(kind) or all(each.name != "batch_size" for each in dataclasses.fields(kind)):
            return walk
        replace: Any = dataclasses.replace
        smaller: Stage = replace(walk, batch_size=size)
        return smaller

    @contextmanager
    def measured(self, place: int, walk: Stage, took: Any = None) -> Iterator[None]:
        """Measure the batch of the block, where somebody wants to know.

        Parameters:
          took: Told the seconds as well.
        """
        adapts = isinstance(walk, TableStage) and (self._target is not None or place in self._shrunk)
        if not adapts and took is None:
            yield
            return
        began = self._clock.monotonic()
        yield
        seconds = self._clock.monotonic() - began
        if took is not None:
            took(seconds)
        if not adapts:
            return
        if seconds > (self._target or _SHRUNK_TARGET).total_seconds():
            self.ease(place)
        else:
            grown = self._adapted[place] + max(1, self._own[place] // _PARTS)
            self._adapted[place] = min(self._own[place], grown)

    def ease(self, place: int) -> None:
        """Halve the next batch of the pass of this number, where batches adapt."""
        if self._target is not None or place in self._shrunk:
            least = min(self._adapted[place], max(1, self._own[place] // _PARTS))
            self._adapted[place] = max(least, self._adapted[place] // 2)

    def shrink(self, place: int, size: int) -> None:
        """Take batches of at most `size` records from the pass of this number, until they succeed and grow again."""
        self._adapted[place] = min(self._adapted[place], size)
        self._shrunk.add(place)
