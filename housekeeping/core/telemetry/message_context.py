"""The message that the current thread processes."""

from __future__ import annotations

import threading
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import datetime
from typing import Final, Literal

#: Sender of a message: the schedule, application code, a parent worker.
Trigger = Literal["schedule", "enqueue", "parent"]


@dataclass(frozen=True, slots=True)
class MessageContext:
    """The message that the current thread processes.

    Attributes:
      message_id: Dramatiq's id; retries and redeliveries keep it.
      trigger: Its sender.
      tick: Nominal time of its tick; None if it was not scheduled.
      stopping: Set once the worker process is shutting down.
      worker: Name of the actor; None if a test or a tool gave none.
    """

    message_id: str
    trigger: Trigger = "enqueue"
    tick: datetime | None = None
    stopping: threading.Event = field(default_factory=threading.Event)
    worker: str | None = None


#: Set by the run log middleware during each message; None on the command line and in other code.
current_message: Final[ContextVar[MessageContext | None]] = ContextVar("current_message", default=None)
