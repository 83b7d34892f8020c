"""What a call's arguments are, in whatever way they were written: the basis of every key."""

from __future__ import annotations

import functools
import hashlib
import inspect
import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

from dramatiq import Actor, Message, MessageProxy, get_encoder
from dramatiq.middleware import MiddlewareError

from housekeeping.core.middleware_errors import InvalidOption

#: How an option may name a key: a callable of the call's arguments, or the names of the arguments that decide.
KeyOption = Callable[..., object] | list[str] | tuple[str, ...] | None

#: What comes out of a queue as it went in.
_AS_SENT: Final = (int, str, bool, type(None))
_ENCODER: Final = json.JSONEncoder(sort_keys=True, separators=(",", ":"))


class UnusableArguments(MiddlewareError):
    """A call's arguments make no key, so calls cannot be compared; the text says why."""


def bound(actor: Actor[..., Any], args: Iterable[Any], kwargs: Mapping[str, Any]) -> inspect.BoundArguments:
    """The call as its worker gets it, defaults filled in: ``send(1)`` and ``send(project_id=1)`` are the same.

    Raises:
      UnusableArguments: When the arguments cannot be sent, or do not fit the actor's parameters.
    """
    signature, names = _signature(actor.fn)
    given = tuple(args)
    if names is not None and not kwargs and len(given) == len(names) and all(type(each) in _AS_SENT for each in given):
        # As below, at a fraction of its price: thousands are enqueued at a time.
        return inspect.BoundArguments(signature, dict(zip(names, given, strict=True)))
    try:
        # There and back: a tuple is sent as a list and a number as a key becomes text, on both sides of the queue.
        sent = get_encoder().decode(get_encoder().encode({"args": list(given), "kwargs": dict(kwargs)}))
        call = signature.bind(*sent["args"], **sent["kwargs"])
    except Exception as error:
        raise UnusableArguments(f"{actor.actor_name}: its arguments: {error}") from None
    call.apply_defaults()
    return call


def named(actor: Actor[..., Any], call: inspect.BoundArguments, key: Callable[..., object]) -> object:
    """What the application's own key says of the call.

    Raises:
      UnusableArguments: When the callable fails, or says nothing.
    """
    try:
        value = key(*call.args, **call.kwargs)
    except Exception as error:
        raise UnusableArguments(f"{actor.actor_name}: its key: {type(error).__name__}: {error}") from error
    if value is None or value == "":
        raise UnusableArguments(f"{actor.actor_name}: its key is {value!r}")
    return value


def digest(actor: Actor[..., Any], args: Iterable[Any], kwargs: Mapping[str, Any], key: KeyOption = None) -> str:
    """A short name for what this call is about; equal for equal arguments, whatever their order.

    Raises:
      UnusableArguments: When what decides cannot be had, or has no JSON form.
    """
    call = bound(actor, args, kwargs)
    decides: object = call.arguments
    if callable(key):
        decides = named(actor, call, key)
    elif key is not None:
        decides = {name: call.arguments[name] for name in key}
    try:
        text = _ENCODER.encode(decides)
    except (TypeError, ValueError) as error:
        raise UnusableArguments(f"{actor.actor_name}: its calls cannot be compared: {error}") from None
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def message_digest(actor: Actor[..., Any], message: Message[Any] | MessageProxy, key: KeyOption = None) -> str:
    """Return the digest of a message's call and of the idempotency key that the application gave it, if any.

    Messages with different idempotency keys have an effect each, so none of them stands for another.

    Raises:
      UnusableArguments: As `digest`.
    """
    about, given = digest(actor, message.args, message.kwargs, key), message.options.get("idempotency_key")
    return about if given is None else hashlib.sha256(f"{about}:{given}".encode()).hexdigest()[:32]


def check_key(actor: Actor[..., Any], option: str, key: object) -> None:
    """Refuse a key that the actor's parameters do not fit, when the actor is declared.

    Raises:
      InvalidOption: In words that show the right form.
    """
    parameters = inspect.signature(actor.fn).parameters
    theirs = ", ".join(parameters)
    if key is None:
        return
    if callable(key):
        if not _fits(key, parameters):
            raise InvalidOption(
                f"{actor.actor_name}: {option} key does not take the actor's arguments; "
                f"it should take its parameters, in their order ({theirs})"
            )
        return
    if not isinstance(key, list | tuple) or not key or not all(name in parameters for name in map(str, key)):
        raise InvalidOption(
            f"{actor.actor_name}: {option} key is {key!r}; "
            f"it should be a callable, or a list of some of the actor's parameters ({theirs})"
        )


def _fits(key: Callable[..., object], parameters: Mapping[str, inspect.Parameter]) -> bool:
    try:
        taken = inspect.signature(key)
    except ValueError:
        return True  # some builtins do not tell
    by_place: list[str] = []
    by_name: dict[str, str] = {}
    for name, each in parameters.items():
        if each.kind is each.VAR_KEYWORD:
            by_name["**"] = name  # stands for a name that nobody knows
        elif each.kind is each.KEYWORD_ONLY:
            by_name[name] = name
        else:
            by_place += [name, name] if each.kind is each.VAR_POSITIONAL else [name]
    try:
        got = taken.bind(*by_place, **by_name).arguments
    except TypeError:
        return False
    # (b, a) takes what (a, b) gives, the wrong way round.
    return not any(name in parameters and isinstance(what, str) and what != name for name, what in got.items())


@functools.lru_cache(maxsize=1024)
def _signature(function: Callable[..., Any]) -> tuple[inspect.Signature, tuple[str, ...] | None]:
    """The function's signature; with its parameters' names where a call by place is sure to fit when it has as many."""
    signature = inspect.signature(function)
    by_place = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    plain = all(each.kind in by_place for each in signature.parameters.values())
    return signature, tuple(signature.parameters) if plain else None
