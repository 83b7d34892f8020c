"""Keys of calls. Equal arguments give equal keys, whether passed by position or by name."""

from __future__ import annotations

import functools
import hashlib
import inspect
import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

from dramatiq import Actor, GenericActor, Message, MessageProxy, get_encoder
from dramatiq.middleware import MiddlewareError

from housekeeping.core.middleware_errors import InvalidOption

#: The value of a key option: a callable of the call's arguments, or the names of the arguments that form the key.
KeyOption = Callable[..., object] | list[str] | tuple[str, ...] | None

#: Types whose values the message encoding does not change.
_UNCHANGED_BY_ENCODING: Final = (int, str, bool, type(None))
_ENCODER: Final = json.JSONEncoder(sort_keys=True, separators=(",", ":"))


class UnusableArguments(MiddlewareError):
    """No key can be computed from a call's arguments; the message says why."""


def bind_call(actor: Actor[..., Any], args: Iterable[Any], kwargs: Mapping[str, Any]) -> inspect.BoundArguments:
    """Bind the arguments to the actor's parameters, as a worker gets them: decoded and with defaults.

    Raises:
      UnusableArguments: The arguments cannot be sent, or do not fit the actor's parameters.
    """
    signature, names = _signature(actor.fn)
    given = tuple(args)
    if (
        names is not None
        and not kwargs
        and len(given) == len(names)
        and all(type(each) in _UNCHANGED_BY_ENCODING for each in given)
    ):
        # The same result as below at a fraction of the cost; thousands are enqueued at a time.
        return inspect.BoundArguments(signature, dict(zip(names, given, strict=True)))
    try:
        # Encoded and decoded: a tuple is sent as a list, and a number as a dictionary key becomes text.
        sent = get_encoder().decode(get_encoder().encode({"args": list(given), "kwargs": dict(kwargs)}))
        call = signature.bind(*sent["args"], **sent["kwargs"])
    except Exception as error:
        raise UnusableArguments(f"{actor.actor_name}: its arguments: {error}") from None
    call.apply_defaults()
    return call


def key_value(actor: Actor[..., Any], call: inspect.BoundArguments, key: Callable[..., object]) -> object:
    """Call the application's key callable with the call's arguments and return its value.

    Raises:
      UnusableArguments: The callable fails, or returns None or an empty string.
    """
    try:
        value = key(*call.args, **call.kwargs)
    except Exception as error:
        raise UnusableArguments(f"{actor.actor_name}: its key: {type(error).__name__}: {error}") from error
    if value is None or value == "":
        raise UnusableArguments(f"{actor.actor_name}: its key is {value!r}")
    return value


def digest(actor: Actor[..., Any], args: Iterable[Any], kwargs: Mapping[str, Any], key: KeyOption = None) -> str:
    """Return a digest of the call's arguments, or of the part that `key` selects. The order of names does not matter.

    Raises:
      UnusableArguments: The key cannot be computed or written as JSON.
    """
    call = bind_call(actor, args, kwargs)
    basis: object = call.arguments
    if callable(key):
        basis = key_value(actor, call, key)
    elif key is not None:
        basis = {name: call.arguments[name] for name in key}
    try:
        text = _ENCODER.encode(basis)
    except (TypeError, ValueError) as error:
        raise UnusableArguments(f"{actor.actor_name}: its calls cannot be compared: {error}") from None
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def message_digest(actor: Actor[..., Any], message: Message[Any] | MessageProxy, key: KeyOption = None) -> str:
    """Return the digest of a message's call and idempotency key, if it has one.

    Messages with different idempotency keys are never duplicates of each other, because each must have its effect.

    Raises:
      UnusableArguments: See `digest`.
    """
    about, given = digest(actor, message.args, message.kwargs, key), message.options.get("idempotency_key")
    return about if given is None else hashlib.sha256(f"{about}:{given}".encode()).hexdigest()[:32]


def check_key(actor: Actor[..., Any], option: str, key: object) -> None:
    """Reject a key option that does not fit the actor's parameters.

    Raises:
      InvalidOption: The message shows the right form.
    """
    parameters = signature_of(actor).parameters
    names = ", ".join(parameters)
    if key is None:
        return
    if callable(key):
        if not _fits(key, parameters):
            raise InvalidOption(
                f"{actor.actor_name}: {option} key does not take the actor's arguments; "
                f"it should take its parameters, in their order ({names})"
            )
        return
    if not isinstance(key, list | tuple) or not key or not all(name in parameters for name in map(str, key)):
        raise InvalidOption(
            f"{actor.actor_name}: {option} key is {key!r}; "
            f"it should be a callable, or a list of some of the actor's parameters ({names})"
        )


def signature_of(actor: Actor[..., Any]) -> inspect.Signature:
    """Return the signature of an actor's function, or of the ``perform`` of a class-based actor."""
    return _signature(actor.fn)[0]


def _fits(key: Callable[..., object], parameters: Mapping[str, inspect.Parameter]) -> bool:
    try:
        signature = inspect.signature(key)
    except ValueError:
        return True  # some builtins have no signature
    by_place: list[str] = []
    by_name: dict[str, str] = {}
    for name, each in parameters.items():
        if each.kind is each.VAR_KEYWORD:
            by_name["**"] = name  # represents names that are unknown here
        elif each.kind is each.KEYWORD_ONLY:
            by_name[name] = name
        else:
            by_place += [name, name] if each.kind is each.VAR_POSITIONAL else [name]
    try:
        bound = signature.bind(*by_place, **by_name).arguments
    except TypeError:
        return False
    # A key (b, a) would get the arguments (a, b) in the wrong order.
    return not any(name in parameters and isinstance(what, str) and what != name for name, what in bound.items())


@functools.lru_cache(maxsize=1024)
def _signature(function: Callable[..., Any]) -> tuple[inspect.Signature, tuple[str, ...] | None]:
    """Return a function's signature, and its parameters' names if all are positional, else None."""
    actor = inspect.unwrap(function)
    # A class-based actor passes all arguments on to `perform`.
    signature = inspect.signature(actor.perform if isinstance(actor, GenericActor) else function)
    by_place = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    plain = all(each.kind in by_place for each in signature.parameters.values())
    return signature, tuple(signature.parameters) if plain else None
