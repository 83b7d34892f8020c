"""Validation of message bodies, because Dramatiq's consumers stop at one that they cannot read."""

from __future__ import annotations

from typing import Any, Final

from dramatiq import Message
from dramatiq.errors import DecodeError

from housekeeping.core.sanitize import error_line

_TYPES: Final[dict[str, type | tuple[type, ...]]] = {
    "actor_name": str,
    "message_id": str,
    "message_timestamp": (int, float),  # other programs send fractions of a millisecond
    "kwargs": dict,
    "options": dict,
}


def read(body: bytes, queue_name: str) -> tuple[Message[Any] | None, str]:
    """Return the message, or None and why it cannot be taken from this queue."""
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
    """Return which part of a message is invalid, or an empty text.

    Note: It leaves out the value, which may be a password.
    """
    for name, kind in _TYPES.items():
        part = getattr(message, name)
        if not isinstance(part, kind):
            return f"its {name} is of type {type(part).__name__}"
    return "its message_id contains a NUL character" if "\0" in message.message_id else ""
