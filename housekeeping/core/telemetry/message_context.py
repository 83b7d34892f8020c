"""What is known of the message being processed, for whoever runs below it."""

from __future__ import annotations

import threading
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import datetime
from typing import Final, Literal

#: Who sent a message: the schedule, application code, a parent worker.
Trigger = Literal["schedule", "enqueue", "parent"]


@dataclass(frozen=True, slots=True)
class MessageContext:
    """The message this thread is at work on.

    Attributes:
      message_id: Dramatiq's id; the same through all retries and redeliveries.
      trigger: Who sent it: the schedule, application code, a parent worker.
      tick: The nominal time of the schedule it stands for; null when it was not scheduled.
      stopping: Set once the worker process has been asked to shut down.
      worker: The name of the actor; null where a test or a tool did not say.
    """

    message_id: str
    trigger: Trigger = "enqueue"
    tick: datetime | None = None
    stopping: threading.Event = field(default_factory=threading.Event)
    worker: str | None = None


#: Set by the run log middleware around each message; null on the command line and in plain code.
current_message: Final[ContextVar[MessageContext | None]] = ContextVar("current_message", default=None)
