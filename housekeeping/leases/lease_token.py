"""Who holds a lease, as its token says: since when, on which machine, in which process, for which message."""

from __future__ import annotations

import os
import platform
import re
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Final
from uuid import uuid4

from housekeeping.core.telemetry.message_context import current_message

#: The milliseconds it was made at, what makes it unique, machine:process, and for a run its worker and message.
_TOKEN: Final = re.compile(r"(?P<ms>\d{1,15})-[0-9a-f]{32}(?: (?P<process>\S*) (?P<worker>\S*) (?P<message_id>\S*))?")


@dataclass(frozen=True, slots=True)
class Holder:
    """What a lease's token says of who holds it.

    Attributes:
      held_since_ms: By its machine's clock, in Unix milliseconds; null: unknown.
      process: Machine and process id, with a colon between.
      worker: The actor or sweep that holds it; null for application code.
      message_id: Of the message that it holds it for; null on the command line and in application code.
    """

    held_since_ms: int | None = None
    process: str | None = None
    worker: str | None = None
    message_id: str | None = None

    @property
    def held_for(self) -> timedelta | None:
        """For how long, by the clocks of the two machines; null: unknown."""
        if self.held_since_ms is None:
            return None
        return timedelta(milliseconds=max(0, time.time() * 1000 - self.held_since_ms))


def new_token(worker: str | None = None) -> str:
    """A token that nobody else has, and that tells `holder_of` who asked for it.

    Parameters:
      worker: Whose run it is for; the worker of the message at work unless said.
    """
    message = current_message.get()
    worker = worker or (message.worker if message else None)
    parts = (f"{platform.node()}:{os.getpid()}", worker or "", message.message_id if message else "")
    # Blanks part the parts.
    return " ".join((f"{int(time.time() * 1000)}-{uuid4().hex}", *("".join(part.split()) for part in parts)))


def holder_of(token: str | None) -> Holder:
    """What a token says; nothing is known of one that was not made here."""
    match = _TOKEN.fullmatch(token or "")
    if match is None:
        return Holder()
    return Holder(int(match["ms"]), *(match[part] or None for part in ("process", "worker", "message_id")))
