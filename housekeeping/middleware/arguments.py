"""What a call's arguments are, in whatever way they were written: the basis of every key."""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from dramatiq import Actor
from dramatiq.middleware import MiddlewareError

from housekeeping.foundation.steering import InvalidOption

#: How an option may name a key: a callable of the call's arguments, or the names of the arguments that decide.
KeyOption = Callable[..., object] | Iterable[str] | None


class NotSerialisable(MiddlewareError):
    """An argument has no JSON form, so calls cannot be compared; the message is refused."""


def bound(actor: Actor[..., Any], args: Iterable[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The call's arguments by name, defaults filled in: ``send(1)`` and ``send(project_id=1)`` are the same.

    Raises:
      NotSerialisable: When the arguments do not fit the actor's parameters at all.
    """
    try:
        call = inspect.signature(actor.fn).bind(*args, **kwargs)
    except TypeError as error:
        raise NotSerialisable(f"{actor.actor_name}: {error}") from None
    call.apply_defaults()
    return dict(call.arguments)


def digest(actor: Actor[..., Any], args: Iterable[Any], kwargs: Mapping[str, Any], key: KeyOption = None) -> str:
    """A short name for what this call is about; equal for equal arguments, whatever their order.

    Raises:
      NotSerialisable: When what decides has no JSON form.
    """
    decides: Any = bound(actor, args, kwargs)
    if callable(key):
        decides = key(*args, **kwargs)
    elif key is not None:
        decides = {name: decides[name] for name in key}
    try:
        text = json.dumps(decides, sort_keys=True, separators=(",", ":"))
    except (TypeError, ValueError) as error:
        raise NotSerialisable(f"{actor.actor_name}: its arguments cannot be compared: {error}") from None
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def check_key(actor: Actor[..., Any], option: str, key: KeyOption) -> None:
    """Refuse a key that the actor's parameters do not fit, when the actor is declared.

    Raises:
      InvalidOption: In words that show the right form.
    """
    parameters = inspect.signature(actor.fn).parameters
    if key is None:
        return
    if callable(key):
        wanted = inspect.signature(key).parameters
        if any(parameter.kind is parameter.VAR_KEYWORD for parameter in wanted.values()):
            return
        takes_any = any(parameter.kind is parameter.VAR_POSITIONAL for parameter in wanted.values())
        if takes_any or list(wanted) == list(parameters):
            return
        raise InvalidOption(
            f"{actor.actor_name}: {option} key takes ({', '.join(wanted)}); "
            f"it should take the actor's own parameters ({', '.join(parameters)})"
        )
    names = list(key)
    unknown = [name for name in names if name not in parameters]
    if unknown or not names:
        raise InvalidOption(
            f"{actor.actor_name}: {option} key names {unknown or 'nothing'}; "
            f"it should name some of the actor's parameters ({', '.join(parameters)})"
        )
