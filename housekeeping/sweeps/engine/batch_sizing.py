"""Size of a run's next batch: the stage's own, a lower limit set by an operator, or adapted to a target duration."""

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

#: An adapted batch has at least a tenth of the full size, and grows by a tenth at a time.
_STEPS: Final = 10
#: Target duration after a batch has timed out, if none is set.
_SHRUNK_TARGET: Final = timedelta(seconds=2)


class BatchSizer:
    """Chooses the size of the next batch of each stage, and knows whether an operator has paused the worker.

    A batch that took longer than its target halves the next one. Any other lets it grow by a tenth of the full size.
    So the size drops at once when the database is slow, and rises carefully.

    Parameters:
      stages: The run's stages. Their batch sizes are never exceeded.
      target: How long a batch should take; None if the size is fixed. Only table stages follow it.
      ignores_pause: True for a run that was forced.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        target: timedelta | None,
        budget: RunBudget,
        clock: Clock,
        *,
        ignores_pause: bool = False,
    ) -> None:
        self._own = [each.batch_size for each in stages]
        self._adapted = list(self._own)
        self._target = target
        self._budget = budget
        self._clock = clock
        self._ignores_pause = ignores_pause
        self._most: int | None = None
        self._resized: dict[tuple[int, int], Stage] = {}  # kept for the compiled statements of each stage
        self._shrunk: set[int] = set()
        self.is_paused = False

    def apply(self, override: Override | None) -> None:
        """Apply the operators' override from now on; None for the worker's own limits."""
        narrow = override if override is not None and override.state == "narrow" else None
        self.is_paused = not self._ignores_pause and override is not None and override.state == "paused"
        self._most = narrow.batch_size if narrow else None
        self._budget.narrow(narrow.max_runtime if narrow else None)

    def sized(self, number: int, stage: Stage, most: int | None = None) -> Stage:
        """Return the stage with the size of its next batch. A stage that cannot be resized stays as it is.

        Parameters:
          number: The number of the stage.
          most: The rows that the breaker and the pace allow; None for any number.
        """
        size = min(self._adapted[number], self._most or self._own[number], most or self._own[number])
        if size == stage.batch_size:
            return stage
        if isinstance(stage, Resizable):
            return stage.resized(size)  # may return the same stage, so it is not kept
        if (number, size) not in self._resized:
            self._resized[number, size] = self._with_batches_of(size, stage)
        return self._resized[number, size]

    @staticmethod
    def _with_batches_of(size: int, stage: Stage) -> Stage:
        kind: Any = stage
        if not dataclasses.is_dataclass(kind) or all(each.name != "batch_size" for each in dataclasses.fields(kind)):
            return stage
        replace: Any = dataclasses.replace
        smaller: Stage = replace(stage, batch_size=size)
        return smaller

    @contextmanager
    def measured(self, number: int, stage: Stage, took: Any = None) -> Iterator[None]:
        """Measure how long the batch in the block takes, and adapt the size of the next one.

        Parameters:
          took: Called with the seconds.
        """
        adapts = isinstance(stage, TableStage) and (self._target is not None or number in self._shrunk)
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
            self.ease(number)
        else:
            grown = self._adapted[number] + max(1, self._own[number] // _STEPS)
            self._adapted[number] = min(self._own[number], grown)

    def ease(self, number: int) -> None:
        """Halve the next batch of the stage, if its batches adapt."""
        if self._target is not None or number in self._shrunk:
            least = min(self._adapted[number], max(1, self._own[number] // _STEPS))
            self._adapted[number] = max(least, self._adapted[number] // 2)

    def shrink(self, number: int, size: int) -> None:
        """Limit batches of the stage to `size` rows, until they succeed and grow again."""
        self._adapted[number] = min(self._adapted[number], size)
        self._shrunk.add(number)
