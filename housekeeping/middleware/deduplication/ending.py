"""End of a message that has a deduplication key: how the key is released, and whether a rerun follows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dramatiq import Message

from housekeeping.middleware.deduplication.keys import release
from housekeeping.middleware.deduplication.steps import Delivery


@dataclass(slots=True)
class Ending:
    """End of a delivery: how to release its key, and the rerun that follows it.

    Attributes:
      tick: Claim of the message's tick.
      sent: The rerun's message once it is in the queue.
    """

    delivery: Delivery
    prefix: str
    tick: str
    sent: Message[Any] | None = None

    def release(self, *, as_waiting: bool = False) -> tuple[list[str], list[Any]]:
        """Return keys and arguments for the script that releases the key of the run, or of a waiting message."""
        run = "" if as_waiting else self.delivery.token
        step = release(self.delivery.key, self.delivery.message_id, run, self.delivery.config.ttl, tick=self.tick)
        return [self.prefix + step.key], step.arguments()

    @property
    def start_unanswered(self) -> bool:
        """Whether Redis has not answered the start of the delivery."""
        return bool(self.delivery.token) and not self.delivery.answered

    @property
    def owes_rerun(self) -> bool:
        """Whether a run that has lost its key is followed by a rerun, because a duplicate may have asked for one."""
        return self.delivery.holds_key and self.delivery.config.reschedule_once
