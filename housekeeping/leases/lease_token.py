"""Token of a lease, which describes its holder: since when, machine, process, worker, message."""

from __future__ import annotations

import os
import platform
import re
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Final
from uuid import uuid4

from housekeeping.core.telemetry.context import current_message

#: Unix milliseconds, random part, machine:process, and for a run its worker and message.
_TOKEN: Final = re.compile(r"(?P<ms>\d{1,15})-[0-9a-f]{32}(?: (?P<process>\S*) (?P<worker>\S*) (?P<message_id>\S*))?")


@dataclass(frozen=True, slots=True)
class Holder:
    """Holder of a lease, as described by its token; None is unknown.

    Attributes:
      held_since_ms: Time of the acquisition by its machine's clock, in Unix milliseconds.
      process: Machine and process id, separated by a colon.
      worker: The actor or sweep that holds the lease; None for application code.
      message_id: Id of the message; None on the command line and in application code.
    """

    held_since_ms: int | None = None
    process: str | None = None
    worker: str | None = None
    message_id: str | None = None

    @property
    def held_for(self) -> timedelta | None:
        """Time since the acquisition, by the clocks of both machines; None if unknown."""
        if self.held_since_ms is None:
            return None
        return timedelta(milliseconds=max(0, time.time() * 1000 - self.held_since_ms))


def new_token(worker: str | None = None) -> str:
    """Return a unique token that describes the current process and message.

    Parameters:
      worker: Name of the worker; by default that of the current message.
    """
    message = current_message.get()
    worker = worker or (message.worker if message else None)
    parts = (f"{platform.node()}:{os.getpid()}", worker or "", message.message_id if message else "")
    # Parts are separated by spaces, so they contain none.
    return " ".join((f"{int(time.time() * 1000)}-{uuid4().hex}", *("".join(part.split()) for part in parts)))


def holder_of(token: str | None) -> Holder:
    """Return the holder that a token describes; all its fields are None for a token in another form."""
    match = _TOKEN.fullmatch(token or "")
    if match is None:
        return Holder()
    return Holder(int(match["ms"]), *(match[part] or None for part in ("process", "worker", "message_id")))
