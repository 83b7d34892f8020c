"""What a dead letter shows to people: secrets masked, texts bounded."""

from __future__ import annotations

from typing import Any, Final

from housekeeping.brokers.dead_letters.models import DeadLetter
from housekeeping.core.sanitize import mask_secrets

#: Characters of a single text that are looked through for secrets; nobody reads more, and the search has its price.
_LONGEST: Final = 20_000
_DEEPEST: Final = 50  # lists and dictionaries within each other that are shown


def without_secrets(value: Any, name: str = "", depth: int = 0) -> Any:
    """What a message carries, passwords masked: in texts, and where a name says that the value is one."""
    if depth > _DEEPEST:
        return "…"
    if isinstance(value, dict):
        named = {str(key)[:_LONGEST]: each for key, each in value.items()}
        return {mask_secrets(key): without_secrets(each, key, depth + 1) for key, each in named.items()}
    if isinstance(value, list | tuple):
        return [without_secrets(each, name, depth + 1) for each in value]
    if value is not None and name and mask_secrets(f"{name}=x") != f"{name}=x":
        return "***"
    return bounded(value) if isinstance(value, str) else value


def arguments(letter: DeadLetter) -> str:
    """The arguments of its call, as they would be written; empty where nothing can read it."""
    if letter.message is None:
        return ""
    given = [repr(without_secrets(each)) for each in letter.message.args]
    named = without_secrets(letter.message.kwargs)
    return ", ".join([*given, *(f"{name}={value!r}" for name, value in named.items())])


def body(letter: DeadLetter) -> dict[str, Any]:
    """What it carries: arguments and options, or the bytes that nothing can read."""
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
    """A text with its secrets masked; of a very long one the beginning."""
    if text is None or len(text) <= _LONGEST:
        return None if text is None else mask_secrets(text)
    # The end of what is cut might be half a secret, which is not known for one.
    return f"{mask_secrets(text[:_LONGEST])[: _LONGEST // 2]}… ({len(text):,} characters)"
