"""Faults that grow with the number of messages. Each is a soak of its own.

They are planted in the hooks that every message passes, so that one fault is in as few lines as a real one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import pytest
from dramatiq import Message, MessageProxy, Middleware

from tests.internals.brokers import Skip
from tests.internals.core import shared_redis
from tests.internals.middleware import Deduplication, RunLog, delivery
from tests.twins import Twin
from tests.twins.planting import in_text

_TESTS: Final = "tests/soak/test_soak.py::"
_SOME: Final = 100  # one in this many messages, where every message would overload the machine

AnyMessage = Message[Any] | MessageProxy
_kept: Final[list[Any]] = []


def _twin(promise: str, test: str, breaks: Callable[[pytest.MonkeyPatch], None]) -> Twin:
    return Twin(promise, breaks.__name__.removeprefix("_"), _TESTS + test, breaks, in_processes=True)


def _besides(patch: pytest.MonkeyPatch, middleware: type[Middleware], does: Callable[[AnyMessage], object]) -> None:
    """Make a middleware do something else after each message."""
    hook = middleware.after_process_message

    def process(self: Any, broker: Any, message: MessageProxy, **how: Any) -> None:
        hook(self, broker, message, **how)
        does(message)

    patch.setattr(middleware, "after_process_message", process)


def _name(kind: str, message: AnyMessage) -> str:
    return f"{shared_redis.namespace}:{kind}:{message.actor_name}:{message.message_id}"


def _drops_some_messages(patch: pytest.MonkeyPatch) -> None:
    before = RunLog.before_process_message

    def process(self: RunLog, broker: Any, message: MessageProxy) -> None:
        before(self, broker, message)
        if message.actor_name == "record" and message.args[0] % _SOME == 0:
            raise Skip("dropped")

    patch.setattr(RunLog, "before_process_message", process)


def _leaves_a_key_per_message(patch: pytest.MonkeyPatch) -> None:
    _besides(patch, Deduplication, lambda message: shared_redis.get().set(_name("dedup", message), "x", ex=600))


def _keeps_completions_forever(patch: pytest.MonkeyPatch) -> None:
    in_text(delivery, "_END", 'given.completed_by, "px", given.ttl', "given.completed_by")(patch)


def _remembers_every_message_id(patch: pytest.MonkeyPatch) -> None:
    _besides(patch, RunLog, lambda message: _kept.append(message.message_id))


TWINS: Final = [
    _twin("F10", "test_each_message_ends_once", _drops_some_messages),
    _twin("D10", "test_there_are_at_most_as_many_keys_as_live_messages", _leaves_a_key_per_message),
    _twin("D10", "test_every_library_key_has_a_ttl", _keeps_completions_forever),
    _twin("D10", "test_no_object_is_kept_per_message", _remembers_every_message_id),
]
