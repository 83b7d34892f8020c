"""Actor options for deduplication, checked when an actor is declared, and the message options that it uses."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final
from uuid import uuid4

from dramatiq import Actor, Message, MessageProxy

from housekeeping.core.middleware_errors import InvalidOption
from housekeeping.leases.renewal import SHORTEST_TTL
from housekeeping.middleware.call_keys import KeyOption, check_key

DEFAULT_TTL: Final = timedelta(hours=1)  # docs/reference/actor-options.md

_STRATEGIES: Final = ("until_executed", "until_executing")
_OPTIONS: Final = {"ttl", "key", "if_deduplicated", "including_scheduled"}

#: The message option with the deduplication state of a message, and its values.
DEDUP_STATE: Final = "deduplication_standing"
CLAIMED: Final = "claimed"  # it took its key when it was enqueued
WHEN_DUE: Final = "when_due"  # it asks for its key when its delay is over, as if it were sent then
SECOND_DELIVERY: Final = "second_delivery"  # another delivery of it is running and has the key, if any
SUPERSEDED: Final = "superseded"  # its retry is in the queue and has the key, if any
RETRY_WAITS: Final = "retry_waits"  # the skip reason of such a delivery
_NEVER_DROPPED: Final = "never_dropped"
#: Message options of a message that others depend on. It is never dropped (promise D2).
_WAITED_FOR: Final = frozenset({"pipe_target", "group_completion_uuid", "on_success", "on_failure", _NEVER_DROPPED})

#: The message option with the name of its key, so that any release that ends the message frees the right key.
KEY: Final = "deduplication_key"

#: The message option with the position in the primary's log when it was sent, see `data_consistency`.
POSITION: Final = "database_position"
#: How long the position of a dropped duplicate is remembered for the message that does its work.
POSITION_REMEMBERED: Final = timedelta(hours=24)

#: The message option that distinguishes the attempts of a requeued dead letter from those before.
LIFE: Final = "deduplication_life"


@dataclass(frozen=True, slots=True)
class DeduplicationConfig:
    """An actor's deduplication options, with defaults filled in."""

    until_executed: bool
    ttl: timedelta
    key: KeyOption
    reschedule_once: bool
    including_scheduled: bool
    supersede_retry: bool


def has_dependents(message: Message[Any] | MessageProxy) -> bool:
    """Return whether other messages depend on this one, so that it must not be dropped."""
    options = message.options
    return not _WAITED_FOR.isdisjoint(options) and any(options.get(name) for name in _WAITED_FOR)


def never_drop(message: Message[Any]) -> None:
    """Mark a message that must not be dropped, because others depend on it, such as a group's callback."""
    message.options[_NEVER_DROPPED] = True


def as_new(message: Message[Any]) -> Message[Any]:
    """Return a dead letter's message without the options of its earlier attempts, so that it claims its key again.

    With them, it would count as the holder of the key, and its next attempt as a waiting retry.
    """
    options = {name: value for name, value in message.options.items() if name not in (DEDUP_STATE, KEY)}
    return dataclasses.replace(message, options={**options, LIFE: uuid4().hex})


def followers_of(message: MessageProxy) -> frozenset[str]:
    """Return the ids of the messages that follow this one: its pipe target and its group's callbacks."""
    options = message.options
    following = [options.get("pipe_target"), *(options.get("group_completion_callbacks") or ())]
    return frozenset(str(each.get("message_id")) for each in following if isinstance(each, dict))


def config_of(actor: Actor[..., Any]) -> DeduplicationConfig | None:
    """Return the actor's deduplication options; None if its messages are not deduplicated."""
    options = actor.options
    if not options.get("idempotent"):
        return None
    strategy = options.get("deduplicate", "until_executing")
    if strategy is None:
        return None
    given: dict[str, Any] = options.get("deduplication", {})
    return DeduplicationConfig(
        strategy == "until_executed",
        given.get("ttl", DEFAULT_TTL),
        given.get("key"),
        given.get("if_deduplicated") == "reschedule_once",
        given.get("including_scheduled", False),
        # A retry of until_executing holds no key that could be taken from it.
        strategy == "until_executed" and bool(options.get("rediscovered")),
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
