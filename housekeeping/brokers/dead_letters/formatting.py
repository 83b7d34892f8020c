"""Formatting of dead letters for people: secrets masked, long texts shortened."""

from __future__ import annotations

from typing import Any, Final

from housekeeping.brokers.dead_letters.models import DeadLetter
from housekeeping.core.sanitize import mask_secrets

#: Characters of a text that are searched for secrets. The search takes time, and longer texts are not readable.
LONGEST: Final = 20_000
_DEEPEST: Final = 50  # levels of nested lists and dictionaries that are shown


def without_secrets(value: Any, name: str = "", depth: int = 0) -> Any:
    """Return a value with passwords masked: in texts, and under names such as ``password``."""
    if depth > _DEEPEST:
        return "…"
    if isinstance(value, dict):
        named = {str(key)[:LONGEST]: each for key, each in value.items()}
        return {mask_secrets(key): without_secrets(each, key, depth + 1) for key, each in named.items()}
    if isinstance(value, list | tuple):
        return [without_secrets(each, name, depth + 1) for each in value]
    if value is not None and name and mask_secrets(f"{name}=x") != f"{name}=x":
        return "***"
    return bounded(value) if isinstance(value, str) else value


def arguments(letter: DeadLetter) -> str:
    """Return the arguments of the call as Python would write them; empty for an unreadable message."""
    if letter.message is None:
        return ""
    given = [repr(without_secrets(each)) for each in letter.message.args]
    named = without_secrets(letter.message.kwargs)
    return ", ".join([*given, *(f"{name}={value!r}" for name, value in named.items())])


def body(letter: DeadLetter) -> dict[str, Any]:
    """Return the arguments and options, or the bytes of an unreadable message."""
    if letter.message is None:
        return {"body": bounded(letter.body.decode("utf-8", "backslashreplace"))}
    options = {name: value for name, value in letter.message.options.items() if name != "traceback"}
    return {
        "args": without_secrets(list(letter.message.args)),
        "kwargs": without_secrets(letter.message.kwargs),
        "options": without_secrets(options),
        "traceback": bounded(letter.traceback),
    }


def bounded(text: str | None) -> str | None:
    """Return a text with secrets masked; of a very long one the beginning."""
    if text is None or len(text) <= LONGEST:
        return None if text is None else mask_secrets(text)
    # The end is cut off as well, because half a secret would not be recognized.
    return f"{mask_secrets(text[:LONGEST])[: LONGEST // 2]}… ({len(text):,} characters)"
