"""What an actor may say of its deduplication, checked when it is declared."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final

from dramatiq import Actor, Message, MessageProxy

from housekeeping.foundation.leases import SHORTEST_TTL
from housekeeping.foundation.steering import InvalidOption
from housekeeping.middleware.arguments import KeyOption, check_key

#: Part of every key: raised when the form of keys changes, so that old and new do not meet by accident.
KEY_VERSION: Final = "v1"
DEFAULT_TTL: Final = timedelta(hours=1)  # semantics.md, Actor options

_STRATEGIES: Final = ("until_executed", "until_executing")
_OPTIONS: Final = {"ttl", "key", "if_deduplicated", "including_scheduled"}
#: Message options that say that somebody waits for this very message: it is never dropped (semantics.md, D2).
_WAITED_FOR: Final = ("pipe_target", "group_completion_uuid", "on_success", "on_failure")


@dataclass(frozen=True, slots=True)
class Terms:
    """An actor's deduplication, defaults filled in."""

    until_executed: bool
    ttl: timedelta
    key: KeyOption
    reschedule_once: bool
    including_scheduled: bool

    def claimed_when_enqueued(self, message: Message[Any], delay: int | None) -> bool:
        """Whether the message is live from now on: not while it is delayed, unless the actor says so.

        A retry of ``until_executed`` holds the key on while it waits.
        """
        if delay is None:
            return True
        return self.including_scheduled or (self.until_executed and "requeue_timestamp" in message.options)

    @staticmethod
    def waited_for(message: Message[Any] | MessageProxy) -> bool:
        """Whether others wait for this message, so that it must not be dropped."""
        return any(message.options.get(name) for name in _WAITED_FOR)


def terms_of(actor: Actor[..., Any]) -> Terms | None:
    """The actor's terms; None when its messages are not deduplicated."""
    options = actor.options
    if not options.get("idempotent"):
        return None
    strategy = options.get("deduplicate", "until_executing")
    if strategy is None:
        return None
    given: dict[str, Any] = options.get("deduplication", {})
    return Terms(
        strategy == "until_executed",
        given.get("ttl", DEFAULT_TTL),
        given.get("key"),
        given.get("if_deduplicated") == "reschedule_once",
        given.get("including_scheduled", False),
    )


def check_options(actor: Actor[..., Any]) -> None:
    """Refuse what cannot work.

    Raises:
      InvalidOption: In words that show the right form.
    """
    name, options = actor.actor_name, actor.options
    strategy = options.get("deduplicate")
    if "deduplicate" in options and strategy is not None:
        if strategy not in _STRATEGIES:
            raise InvalidOption(
                f"{name}: deduplicate is {strategy!r}; it should be one of {', '.join(_STRATEGIES)}, None"
            )
        if not options.get("idempotent"):
            raise InvalidOption(f"{name}: deduplicate needs idempotent=True")
    given = options.get("deduplication")
    if given is None:
        return
    if not isinstance(given, dict) or not set(given) <= _OPTIONS:
        raise InvalidOption(f"{name}: deduplication is {given!r}; its keys should be of {', '.join(sorted(_OPTIONS))}")
    if terms_of(actor) is None:
        raise InvalidOption(f"{name}: deduplication needs idempotent=True and deduplicate not None")
    ttl = given.get("ttl", DEFAULT_TTL)
    if not isinstance(ttl, timedelta) or ttl < SHORTEST_TTL:
        raise InvalidOption(f"{name}: deduplication ttl is {ttl!r}; it should be a timedelta of at least 3 seconds")
    if given.get("if_deduplicated", "drop") not in ("drop", "reschedule_once"):
        raise InvalidOption(
            f'{name}: if_deduplicated is {given["if_deduplicated"]!r}; it should be "drop" or "reschedule_once"'
        )
    if not isinstance(given.get("including_scheduled", False), bool):
        raise InvalidOption(f"{name}: including_scheduled should be True or False")
    check_key(actor, "deduplication", given.get("key"))
