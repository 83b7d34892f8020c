"""What is wrong with a message that Dramatiq's consumers would break off at."""

from __future__ import annotations

from typing import Any

from dramatiq import Message
from dramatiq.errors import DecodeError

from housekeeping.foundation.db import one_line


def read(body: bytes, queue_name: str) -> tuple[Message[Any] | None, str]:
    """The message, or none and why it cannot be taken from this queue."""
    try:
        message: Message[Any] = Message.decode(body)
    except DecodeError as error:
        return None, one_line(error.__cause__ or error)
    options: Any = message.options
    if not isinstance(options, dict):
        return None, "its options are no object"
    if message.queue_name != queue_name:
        return None, f"it says that its queue is {message.queue_name!r}"
    return message, ""
