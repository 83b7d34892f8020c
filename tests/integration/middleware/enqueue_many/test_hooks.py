"""Hooks of other middleware around a bulk enqueue."""

from __future__ import annotations

from typing import Any

import pytest
from dramatiq import Broker, Message, Middleware
from dramatiq.brokers.redis import RedisBroker
from dramatiq.middleware import MiddlewareError

from housekeeping import Settings, enqueue_many
from tests.integration.middleware.applications import queued
from tests.integration.middleware.enqueue_many.bulked import actor_of, keys
from tests.internals.brokers import SkipEnqueue


class Watching(Middleware):
    """Middleware that records its hooks and treats each message as its argument says."""

    def __init__(self) -> None:
        self.before: list[tuple[Any, int | None]] = []
        self.after: list[tuple[Any, int | None]] = []

    def before_enqueue(self, broker: Broker, message: Message[Any], delay: int | None) -> None:
        (what,) = message.args
        self.before.append((what, delay))
        if what == "skip":
            raise SkipEnqueue("not_wanted")
        if what == "refuse":
            raise MiddlewareError("not this one")
        if what == "stumble":
            raise ValueError("a fault of the middleware's own")

    def after_enqueue(self, broker: Broker, message: Message[Any], delay: int | None) -> None:
        self.after.append((message.args[0], delay))
        if message.args[0] == "stumble":
            raise ValueError("another")


def test_other_middleware_sees_every_message(broker: RedisBroker) -> None:
    watching = Watching()
    broker.add_middleware(watching)
    work = actor_of(broker)
    work.send("waits")
    watching.before.clear()
    watching.after.clear()

    enqueue_many(work, ["a", "waits", "b"])

    assert watching.before == [("a", None), ("waits", None), ("b", None)]
    assert watching.after == [("a", None), ("b", None)]


def test_message_skipped_by_other_middleware_is_the_only_one_missing(broker: RedisBroker) -> None:
    broker.add_middleware(Watching())

    messages = enqueue_many(actor_of(broker), ["a", "skip", "b"])

    assert ["duplicate_of" in message.options for message in messages] == [False, True, False]
    assert [message.args for message in queued(broker)] == [("a",), ("b",)]


def test_failing_hook_stops_no_message(broker: RedisBroker, caplog: pytest.LogCaptureFixture) -> None:
    # As in Dramatiq's own emit_before and emit_after.
    broker.add_middleware(Watching())

    enqueue_many(actor_of(broker), ["stumble", "b"])

    assert len(queued(broker)) == 2
    assert [record.levelname for record in caplog.records if "Unexpected failure" in record.message] == ["CRITICAL"] * 2


def test_refused_message_fails_its_bulk_before_any_key_is_taken(broker: RedisBroker, settings: Settings) -> None:  # D6
    broker.add_middleware(Watching())

    with pytest.raises(MiddlewareError, match="not this one"):
        enqueue_many(actor_of(broker), ["a", "refuse"])

    assert queued(broker) == []
    assert keys(broker, settings) == {}
