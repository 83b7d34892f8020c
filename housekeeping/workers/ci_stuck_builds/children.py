"""The pass of a parent worker that enqueues its children."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from housekeeping.foundation.db import one_line
from housekeeping.foundation.logs import logger as named_logger
from housekeeping.sweeps.actors import actor_named
from housekeeping.sweeps.passes import Backlog, PassPlan, Settled, Step

logger = named_logger(__name__)


@dataclass(frozen=True)
class EnqueueChildren:
    """Enqueue each child with its delay, once: a child that waits already is left to it.

    Attributes:
      delays: Child's name -> after how long it is to run.
    """

    delays: Mapping[str, timedelta]
    name: str = "children"

    @property
    def batch_size(self) -> int:
        return len(self.delays)

    def take(self, step: Step) -> int:
        """Enqueue them all; returns how many were not waiting already.

        Raises:
          Exception: What kept one from the queue, after the others were tried; the run is repeated then.
        """
        enqueued, failed = 0, list[Exception]()
        hour = step.now.strftime("%Y-%m-%dT%H")
        for child, delay in self.delays.items():
            try:
                message = actor_named(child).send_with_options(
                    delay=int(delay.total_seconds() * 1000),
                    trigger="parent",
                    # Of the hour, so that one that has begun, or is done, is not run again by a second parent run.
                    idempotency_key=hour,
                )
            except Exception as error:
                logger.error("A child could not be enqueued", child=child, error=one_line(error))
                failed.append(error)
            else:
                enqueued += "duplicate_of" not in message.options
        if failed:
            raise failed[0]
        return enqueued

    def settle(self, step: Step, taken: int) -> Settled:
        return Settled({"enqueued": taken})

    def committed(self, step: Step, settled: Settled) -> None:
        """Nothing: the children speak for themselves."""

    def backlog(self, now: datetime, limit: int, argument: Any = None) -> Backlog:
        return Backlog(0)

    def oldest(self, now: datetime, argument: Any = None) -> None:
        return None

    def plan(self, now: datetime, limit: int, argument: Any = None) -> PassPlan:
        return PassPlan(self.name, Backlog(0), {"enqueued": len(self.delays)})
