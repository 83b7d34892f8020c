"""What is wrong with a message that Dramatiq's consumers would break off at, and nobody can run."""

from __future__ import annotations

from typing import Any, Final

from dramatiq import Message
from dramatiq.errors import DecodeError

from housekeeping.core.sanitize import error_line

_TYPES: Final[dict[str, type | tuple[type, ...]]] = {
    "actor_name": str,
    "message_id": str,
    "message_timestamp": (int, float),  # fractions of a millisecond, as other programs send them, hurt nobody
    "kwargs": dict,
    "options": dict,
}


def read(body: bytes, queue_name: str) -> tuple[Message[Any] | None, str]:
    """The message, or none and why it cannot be taken from this queue."""
    try:
        message: Message[Any] = Message.decode(body)
    except DecodeError as error:
        return None, error_line(error.__cause__ or error)
    if wrong := wrong_type(message):
        return None, wrong
    if message.queue_name != queue_name:
        return None, f"it says that its queue is {message.queue_name!r}"
    return message, ""


def wrong_type(message: Message[Any]) -> str:
    """Which of its parts is not of the type it should be; empty when all are.

    Note: It does not say what the part is, which may be a password.
    """
    for name, kind in _TYPES.items():
        part = getattr(message, name)
        if not isinstance(part, kind):
            return f"its {name} is of type {type(part).__name__}"
    return ""
