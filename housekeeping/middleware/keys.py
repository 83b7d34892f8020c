"""Deduplication keys: the options of an actor, which message holds which key, and how an operator releases one.

Equal arguments give equal keys, whether passed by position or by name. Each change of a key is one Lua script, so it
is atomic and takes one round trip.

The states and fields of a key are in a table at the head of ``keys.lua``. `Admission` in `delivery` releases a key at
the end of its message, together with what else the message holds.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, Final, Literal, NamedTuple

import redis
from dramatiq import Actor, Broker, GenericActor, Message, MessageProxy, get_encoder
from dramatiq.middleware import MiddlewareError
from redis.client import Pipeline

from housekeeping.brokers.dead_letters import OF_DEDUPLICATION
from housekeeping.brokers.dramatiq_internals import InvalidOption
from housekeeping.core.cron import Cron
from housekeeping.core.errors import Refused
from housekeeping.core.redis import GIVEN, milliseconds, named, read_each, read_scripts, text, translate_redis_errors
from housekeeping.leases.renewal import SHORTEST_TTL

#: The value of a key option: a callable of the call's arguments, or the names of the arguments that form the key.
KeyOption = Callable[..., object] | list[str] | tuple[str, ...] | None

#: Types whose values the message encoding does not change.
_UNCHANGED_BY_ENCODING: Final = frozenset({int, str, bool, type(None)})
_ENCODER: Final = json.JSONEncoder(sort_keys=True, separators=(",", ":"))


class UnusableArguments(MiddlewareError):
    """No key can be computed from a call's arguments; the message says why."""


def bind_call(actor: Actor[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> inspect.BoundArguments:
    """Bind the arguments to the actor's parameters, as a worker gets them: decoded and with defaults.

    Raises:
      UnusableArguments: The arguments cannot be sent, or do not fit the actor's parameters.
    """
    if _plain_places(actor, args, kwargs) is not None:
        signature = signature_of(actor)
        return inspect.BoundArguments(signature, dict(zip(signature.parameters, args, strict=True)))
    try:
        # Encoded and decoded: a tuple is sent as a list, and a number as a dictionary key becomes text.
        sent = get_encoder().decode(get_encoder().encode({"args": list(args), "kwargs": dict(kwargs)}))
        call = signature_of(actor).bind(*sent["args"], **sent["kwargs"])
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


def digest(actor: Actor[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], key: KeyOption = None) -> str:
    """Return a digest of the call's arguments, or of the part that `key` selects. The order of names does not matter.

    Raises:
      UnusableArguments: The key cannot be computed or written as JSON.
    """
    if key is None and (places := _plain_places(actor, args, kwargs)) is not None:
        # The same text as below in a fifth of the time; thousands of messages are enqueued at a time.
        values = [f"{name}{v if type(v := args[place]) is int else _ENCODER.encode(v)}" for name, place in places]
        return short_digest(f"{{{','.join(values)}}}")
    call = bind_call(actor, args, kwargs)
    basis: object = call.arguments
    if callable(key):
        basis = key_value(actor, call, key)
    elif key is not None:
        basis = {name: call.arguments[name] for name in key}
    try:
        return short_digest(_ENCODER.encode(basis))
    except (TypeError, ValueError) as error:
        raise UnusableArguments(f"{actor.actor_name}: its calls cannot be compared: {error}") from None


def short_digest(text: str) -> str:
    """Return a digest of a text, which may also have lone surrogates."""
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()[:32]


def _plain_places(
    actor: Actor[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> list[tuple[str, int]] | None:
    """Return the places of the arguments by their parameters' names in JSON; None if a call has to be bound."""
    places = _signature(actor.fn)[1]
    is_plain = places is not None and not kwargs and len(args) == len(places)
    return places if is_plain and _UNCHANGED_BY_ENCODING.issuperset(map(type, args)) else None


def message_digest(actor: Actor[..., Any], message: Message[Any] | MessageProxy, key: KeyOption = None) -> str:
    """Return the digest of a message's call and idempotency key, if it has one.

    Messages with different idempotency keys are never duplicates of each other, because each must have its effect.

    Raises:
      UnusableArguments: See `digest`.
    """
    about, given = digest(actor, message.args, message.kwargs, key), message.options.get("idempotency_key")
    return about if given is None else short_digest(f"{about}:{given}")


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
def _signature(function: Callable[..., Any]) -> tuple[inspect.Signature, list[tuple[str, int]] | None]:
    """Return a function's signature and, if all parameters are positional, their names in JSON with their places."""
    actor = inspect.unwrap(function)
    # A class-based actor passes all arguments on to `perform`.
    signature = inspect.signature(actor.perform if isinstance(actor, GenericActor) else function)
    by_place = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    plain = all(each.kind in by_place for each in signature.parameters.values())
    places = sorted((name, place) for place, name in enumerate(signature.parameters))
    return signature, [(f"{_ENCODER.encode(name)}:", place) for name, place in places] if plain else None


DEFAULT_TTL: Final = timedelta(hours=1)  # docs/reference/actor-options.md

_STRATEGIES: Final = ("until_executed", "until_executing")
_OPTIONS: Final = {"ttl", "key", "if_deduplicated", "including_scheduled"}

#: The message option with the deduplication state of a message, and its values.
DEDUP_STATE: Final = OF_DEDUPLICATION + "standing"
CLAIMED: Final = "claimed"  # it took its key when it was enqueued
WHEN_DUE: Final = "when_due"  # it asks for its key when its delay is over, as if it were sent then
SECOND_DELIVERY: Final = "second_delivery"  # another delivery of it is running and has the key, if any
RETRIED: Final = "retried"  # its retry is in the queue and has the key, if any
RETRY_WAITS: Final = "retry_waits"  # the skip reason of such a delivery
_NEVER_DROPPED: Final = "never_dropped"
#: Message options of a message that others depend on. It is never dropped (promise D2).
WAITED_FOR: Final = frozenset({"pipe_target", "group_completion_uuid", "on_success", "on_failure", _NEVER_DROPPED})

#: The message option with the name of its key, so that any release that ends the message frees the right key.
KEY: Final = OF_DEDUPLICATION + "key"

#: The message option with the position in the primary's log when it was sent, see `data_consistency`.
POSITION: Final = "database_position"
#: How long the position of a dropped duplicate is remembered for the message that does its work.
POSITION_REMEMBERED: Final = timedelta(hours=24)


@dataclass(frozen=True, slots=True)
class DeduplicationConfig:
    """An actor's deduplication options, with defaults filled in.

    Attributes:
      claim: The arguments of the script that claims a key for an ordinary new message, which all of them share.
    """

    until_executed: bool
    ttl: timedelta
    key: KeyOption
    reschedule_once: bool
    including_scheduled: bool
    claim: dict[str, Any] = field(default_factory=dict, compare=False)


def has_dependents(message: Message[Any] | MessageProxy) -> bool:
    """Return whether other messages depend on this one, so that it must not be dropped."""
    options = message.options
    return not WAITED_FOR.isdisjoint(options) and any(options.get(name) for name in WAITED_FOR)


def tick_of(message: Message[Any] | MessageProxy) -> datetime | None:
    """Return the tick of a message; None if it was not sent by a schedule."""
    tick = message.options.get("tick")
    try:
        return datetime.fromisoformat(tick) if isinstance(tick, str) else None
    except ValueError:
        return None


def schedule_of(broker: Broker, message: Message[Any]) -> Cron | None:
    """Return the schedule of a message that comes directly from periodiq; None for a retry and any other message."""
    if "scheduled_at" not in message.options or "tick" in message.options:
        return None
    actor = broker.actors.get(message.actor_name)  # another service or release may have actors that are unknown here
    cron = None if actor is None else actor.options.get("periodic")
    return cron if isinstance(cron, Cron) else None


def never_drop(message: Message[Any]) -> None:
    """Mark a message that must not be dropped, because others depend on it, such as a group's callback."""
    message.options[_NEVER_DROPPED] = True


def is_follower(message: Message[Any]) -> bool:
    """Return whether `never_drop` has marked the message."""
    return _NEVER_DROPPED in message.options


def followers_of(message: MessageProxy) -> frozenset[str]:
    """Return the ids of the messages that follow this one: its pipe target and its group's callbacks."""
    options = message.options
    callbacks = options.get("group_completion_callbacks")
    following = [options.get("pipe_target"), *(callbacks if isinstance(callbacks, list | tuple) else ())]
    return frozenset(str(each.get("message_id")) for each in following if isinstance(each, dict))


@functools.lru_cache(maxsize=1024)
def config_of(actor: Actor[..., Any]) -> DeduplicationConfig | None:
    """Return the actor's deduplication options; None if its messages are not deduplicated."""
    options = actor.options
    if not options.get("idempotent"):
        return None
    strategy = options.get("deduplicate", "until_executing")
    if strategy is None:
        return None
    given: dict[str, Any] = options.get("deduplication", {})
    ttl, reschedule_once = given.get("ttl", DEFAULT_TTL), given.get("if_deduplicated") == "reschedule_once"
    return DeduplicationConfig(
        strategy == "until_executed",
        ttl,
        given.get("key"),
        reschedule_once,
        given.get("including_scheduled", False),
        key_step("claim", "", "", ttl, ask_for_rerun=reschedule_once).shared if isinstance(ttl, timedelta) else {},
    )


def check_options(actor: Actor[..., Any]) -> None:
    """Reject deduplication options that cannot work.

    Raises:
      InvalidOption: The message shows the right form.
    """
    name, options = actor.actor_name, actor.options
    strategy = options.get("deduplicate")
    if "deduplicate" in options and strategy is not None:
        if strategy not in _STRATEGIES:
            raise InvalidOption(
                f'{name}: deduplicate is {strategy!r}; it should be "until_executed", "until_executing" or None'
            )
        if not options.get("idempotent"):
            raise InvalidOption(f"{name}: deduplicate={strategy!r} needs idempotent=True beside it")
    given = options.get("deduplication")
    if given is None:
        return
    if not isinstance(given, dict) or not set(given) <= _OPTIONS:
        raise InvalidOption(
            f"{name}: deduplication is {given!r}; its keys should be among {', '.join(sorted(_OPTIONS))}"
        )
    if config_of(actor) is None:
        raise InvalidOption(
            f"{name}: deduplication needs idempotent=True, "
            'and deduplicate="until_executed" or "until_executing" (the default)'
        )
    ttl = given.get("ttl", DEFAULT_TTL)
    if not isinstance(ttl, timedelta) or ttl < SHORTEST_TTL:
        raise InvalidOption(f"{name}: deduplication ttl is {ttl!r}; it should be a timedelta of at least 3 seconds")
    if given.get("if_deduplicated", "drop") not in ("drop", "reschedule_once"):
        raise InvalidOption(
            f'{name}: if_deduplicated is {given["if_deduplicated"]!r}; it should be "drop" or "reschedule_once"'
        )
    if not isinstance(given.get("including_scheduled", False), bool):
        raise InvalidOption(
            f"{name}: including_scheduled is {given['including_scheduled']!r}; it should be True or False"
        )
    check_key(actor, "deduplication", given.get("key"))


#: The scripts of the file beside this module, by name.
_LUA: Final = read_scripts(__file__)
CLAIM: Final = _LUA["claim"]
RETAIN: Final = _LUA["retain"]
RELEASE: Final = _LUA["release"]
CONFIRM: Final = _LUA["confirm"]
START: Final = _LUA["start"]
RENEW: Final = _LUA["renew"]


#: Part of every key. Raised when the format of keys changes, so that releases do not misread each other's keys.
KEY_VERSION: Final = "v1"
#: Maximum time that a key blocks others if the process dies after taking the key and before enqueueing the message. If
#: keys and queue share a Redis, one script does both and this cannot happen.
RESERVED_FOR: Final = timedelta(seconds=5)

KeyChange = Literal["claim", "retain", "release"]


class KeyStep(NamedTuple):
    """Change of a key in Redis when a message is enqueued or ends; made by `key_step`.

    Attributes:
      shared: The arguments of the kind's Lua script, by name, without the message id.
      fresh: Whether the message is new, neither a retry nor a requeue.
      once: Whether the message is not enqueued if a copy of it waits in the queue.
    """

    kind: KeyChange
    key: str
    message_id: str
    shared: dict[str, Any]
    fresh: bool = False
    once: bool = False

    @property
    def arguments(self) -> dict[str, Any]:
        """All arguments of the kind's Lua script, by name."""
        return {**self.shared, "message_id": self.message_id}


def key_step(
    kind: KeyChange,
    key: str,
    message_id: str,
    ttl: timedelta,
    *,
    fresh: bool = False,
    once: bool = False,
    **more: object,
) -> KeyStep:
    """Return the step that takes, keeps or releases a key; see `KeyStep`.

    Parameters:
      ttl: How long the key is held.
      more: Further arguments of the Lua script of this kind, which describes them; empty ones are left out.
    """
    given: dict[str, object] = {"ttl": milliseconds(ttl)}
    for name, value in more.items():
        if value:
            given[name] = value
    if kind == "claim":
        given["state"] = "waiting"
    return KeyStep(kind, key, message_id, given, fresh, once)


class DeduplicationKeys:
    """The deduplication keys of an application. Any method may raise `RedisUnavailable`; all are safe to repeat.

    A waiting message holds a key by its id. A running one holds it by the token of its run, so that a second delivery
    of the same message cannot release the key.
    """

    def __init__(self, client: redis.Redis, namespace: str) -> None:
        self.client = client
        self.prefix = key_prefix(namespace)
        register: Any = client.register_script
        self._steps: dict[KeyChange, Any] = {
            "claim": register(GIVEN + CLAIM),
            "retain": register(GIVEN + RETAIN),
            "release": register(GIVEN + RELEASE),
        }
        self._confirm = register(GIVEN + CONFIRM)
        self._renew = register(GIVEN + RENEW)
        self._queues = ""  # namespace of the queues, if they are on the same Redis

    def share_redis_with_queues(self, namespace: str) -> None:
        """Tell where the queues are, so that a new message can take the key of a message that has left them."""
        self._queues = namespace

    @property
    def see_copies(self) -> bool:
        """Whether a key knows the copy of its message in the queue, because both are on the same Redis."""
        return bool(self._queues)

    def copy_of(self, message: MessageProxy) -> dict[str, str]:
        """Return the id in Redis of a delivered message and the Redis key of its queue's bodies, by their names."""
        copy = message.options.get("redis_message_id")
        return {"copy": copy, "bodies": f"{self._queues}:{message.queue_name}.msgs"} if self.see_copies and copy else {}

    def take(self, step: KeyStep) -> str:
        """Execute a step without enqueueing; return the id of the message that prevents it, or an empty string.

        A claim for a message that is sent for the first time reserves the key until `confirm`.
        """
        with translate_redis_errors():
            return text(self._run(step, None))

    def take_many(self, steps: Sequence[KeyStep | None]) -> list[str]:
        """Execute steps as `take` does, in one round trip; None stands for a message without a key."""
        with translate_redis_errors(), self.client.pipeline(transaction=False) as pipeline:
            for step in steps:
                if step is not None:
                    self._run(step, pipeline)
            holders = iter(pipeline.execute())
        return ["" if step is None else text(next(holders)) for step in steps]

    def confirm(self, step: KeyStep, pipeline: Pipeline | None = None) -> None:
        """Turn a reserved key into a held one, because its message is now in the queue."""
        with translate_redis_errors():
            self._confirm(keys=[self.prefix + step.key], args=[named(**step.arguments)], client=pipeline)

    def confirm_many(self, steps: Sequence[KeyStep | None]) -> None:
        """Call `confirm` for several steps, in one round trip."""
        with translate_redis_errors(), self.client.pipeline(transaction=False) as pipeline:
            for step in steps:
                if step is not None:
                    self.confirm(step, pipeline)
            pipeline.execute()

    def renew(self, key: str, run: str, ttl: timedelta) -> bool:
        """Extend the key's TTL; return False if the run no longer holds it."""
        with translate_redis_errors():
            return bool(self._renew(keys=[self.prefix + key], args=[named(run=run, ttl=milliseconds(ttl))]))

    def _run(self, step: KeyStep, pipeline: Pipeline | None) -> Any:
        arguments = step.arguments
        if step.fresh and step.kind == "claim":
            arguments = {**arguments, "ttl": milliseconds(RESERVED_FOR), "state": "reserved"}
        return self._steps[step.kind](keys=[self.prefix + step.key], args=[named(**arguments)], client=pipeline)


def key_prefix(namespace: str) -> str:
    """Return the prefix of every deduplication key in Redis."""
    return f"{namespace}:dedup:{KEY_VERSION}:"


def position_prefix(namespace: str) -> str:
    """Return the prefix of the Redis keys that hold the positions of dropped messages."""
    return key_prefix(namespace).replace(":dedup:", ":position:", 1)  # the script builds the name in the same way


_PAGE: Final = 1000  # keys that Redis scans in one step, during which other clients wait
_FIELDS: Final = ["id", "state", "again"]

_RELEASE: Final = _LUA["free"]


@dataclass(frozen=True, slots=True)
class HeldKey:
    """A deduplication key and the message that holds it.

    Attributes:
      state: ``waiting`` (queued, delayed, or for a retry), ``running``, or ``reserved`` (not in the queue yet).
      remaining_s: Seconds until the key expires, unless it is renewed.
      again: Whether a rerun is wanted after the current run.
    """

    key: str
    actor: str
    state: str
    message_id: str
    remaining_s: float
    again: bool


def held_keys(client: redis.Redis, namespace: str, most: int) -> tuple[list[HeldKey], bool]:
    """Return the held keys, sorted by name, and whether there are more than `most`.

    Redis is scanned in small steps, so that it keeps serving others however many keys it has.

    Raises:
      RedisUnavailable: When Redis does not answer.
    """
    prefix = key_prefix(namespace)
    found: dict[str, HeldKey] = {}
    with translate_redis_errors():
        for page in _pages(client, re.sub(r"([\[\]*?\\])", r"\\\1", prefix) + "*"):
            # A scan may return a key twice.
            found |= {each.key: each for each in _read(client, prefix, page)}
            if len(found) > most:
                break
    held = sorted(found.values(), key=lambda each: each.key)
    return held[:most], len(held) > most


def held_key(client: redis.Redis, namespace: str, key: str) -> HeldKey:
    """Return a held key.

    Raises:
      Refused: When no message holds it.
      RedisUnavailable: When Redis does not answer.
    """
    prefix = key_prefix(namespace)
    with translate_redis_errors():
        held = next(_read(client, prefix, [prefix + key]), None)
    if held is None:
        raise Refused(f"no message holds the key {key!r}; see: housekeeping dedup list")
    return held


def release_key(client: redis.Redis, namespace: str, key: str) -> HeldKey | None:
    """Release a key whatever message holds it; return what it held, or None if it was free already.

    A message that is alive continues. It can neither renew nor free the key once another message has taken it.

    Raises:
      RedisUnavailable: When Redis does not answer; the key may have been released nevertheless.
    """
    with translate_redis_errors():
        released: Any = client.register_script(_RELEASE)(keys=[key_prefix(namespace) + key])
    return _held(key, released[:3], released[3]) if released else None


def _pages(client: redis.Redis, pattern: str) -> Iterator[list[str]]:
    cursor: Any = 0
    while True:
        cursor, page = client.scan(cursor, match=pattern, count=_PAGE)
        if page:
            yield [text(name) for name in page]
        if int(cursor) == 0:
            return


def _read(client: redis.Redis, prefix: str, names: list[str]) -> Iterator[HeldKey]:
    for name, fields, left in read_each(client, names, lambda pipeline, name: pipeline.hmget(name, _FIELDS)):
        held = _held(name.removeprefix(prefix), fields, left)
        if held is not None:
            yield held


def _held(key: str, fields: list[Any], left: int) -> HeldKey | None:
    message_id, state, again = (text(field) for field in fields)
    if not message_id or left < 0:
        return None  # its message ended meanwhile
    return HeldKey(key, key.rpartition(":")[0], state, message_id, left / 1000, bool(again))
