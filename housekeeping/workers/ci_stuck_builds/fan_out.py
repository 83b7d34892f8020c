"""Fan-out of a parent worker: its children are enqueued before the parent acquires its lease."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta

from housekeeping.sweeps import Backlog, PreflightResult, StagePlan, actor_named, error_line
from housekeeping.sweeps import logger as named_logger

logger = named_logger(__name__)


@dataclass(frozen=True)
class EnqueueChildren:
    """Preflight that enqueues each child with its delay, unless the child is still live.

    Attributes:
      delays: Child's name -> delay after the parent.
    """

    delays: Mapping[str, timedelta]

    def carry_out(self) -> PreflightResult:
        """Enqueue all children; a failure does not affect the other children."""
        enqueued, errors = 0, list[Exception]()
        for child, delay in self.delays.items():
            try:
                message = actor_named(child).send_with_options(
                    delay=int(delay.total_seconds() * 1000), trigger="parent"
                )
            except Exception as error:
                logger.error("Child not enqueued", child=child, error=error_line(error))
                errors.append(error)
            else:
                enqueued += "duplicate_of" not in message.options
        return PreflightResult({"enqueued": enqueued}, errors[0] if errors else None)

    def plan(self) -> StagePlan:
        """Return the children and their delays; those that are still live would not be enqueued again."""
        samples = [{"child": child, "delay_s": delay.total_seconds()} for child, delay in self.delays.items()]
        return StagePlan("children", Backlog(0), {"enqueued": len(self.delays)}, samples=samples)
