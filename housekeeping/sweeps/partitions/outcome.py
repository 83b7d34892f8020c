"""What became of a partition in a batch, and its log line."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from housekeeping.core.telemetry.logs import logger as named_logger
from housekeeping.sweeps.partitions.action import FREED, SKIPPED
from housekeeping.sweeps.partitions.candidate import Candidate

logger = named_logger(__name__)

#: ``attached``: again, because a row came before the drop. ``busy``: locked by others, to be tried again. ``gone``:
#: another session has taken it over.
What = Literal["dropped", "detached", "stays", "attached", "busy", "gone"]


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of the attempt to drop a partition.

    Attributes:
      reason: Why it was not dropped; None if it was.
      freed: Bytes that the drop frees.
    """

    what: What
    reason: str | None = None
    freed: int = 0

    @property
    def counts(self) -> dict[str, Any]:
        """What the batch counts."""
        if self.what == "dropped":
            return {"dropped_partitions": 1, FREED: self.freed}
        if self.what == "detached":
            return {"detached_partitions": 1}
        return {SKIPPED: 1} if self.what in ("stays", "attached") else {}

    def log(self, candidate: Candidate) -> None:
        """Write the log line of the committed batch."""
        name, bounds = candidate.partition.name, candidate.partition.bounds
        if self.what == "dropped":
            logger.info("Partition dropped", partition=name, range=bounds, freed_bytes=self.freed)
        elif self.what == "detached":
            logger.info("Partition detached", partition=name, range=bounds)
        elif self.what == "gone":
            logger.info("Partition is gone", partition=name, range=bounds, reason=self.reason)
        elif self.what == "busy":
            logger.info("Partition is locked and tried again", partition=name, range=bounds, reason=self.reason)
        elif self.what == "attached":
            logger.warning("Partition was attached again", partition=name, range=bounds, reason=self.reason)
        else:
            logger.warning("Partition stays", partition=name, range=bounds, reason=self.reason)
