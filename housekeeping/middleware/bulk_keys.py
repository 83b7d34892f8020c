"""The deduplication keys of many messages, taken in one round trip and confirmed in another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import redis
from dramatiq import Actor, Message
from redis.client import Pipeline

from housekeeping.foundation.redis_client import reaching_redis
from housekeeping.foundation.steering import SkipEnqueue, failing_the_message
from housekeeping.middleware.deduplication import RESERVED_FOR, Deduplication, key_of
from housekeeping.middleware.deduplication_keys import DeduplicationKeys
from housekeeping.middleware.deduplication_options import CLAIMED, STANDING, terms_of, waited_for


class _Queued(DeduplicationKeys):
    """The same keys and scripts, whose calls wait in a pipeline."""

    def __init__(self, keys: DeduplicationKeys, pipeline: Pipeline) -> None:
        self.__dict__ |= keys.__dict__
        self._pipeline = pipeline

    def _call(self, script: Any, key: str, *args: str | int) -> Any:
        return script(keys=[self._prefix + key], args=args, client=self._pipeline)


@dataclass(frozen=True, slots=True)
class _Reserved:
    key: str
    message_id: str
    ttl: timedelta


class KeysOfMany:
    """The keys of one bulk of an actor's messages, by the rules of `Deduplication` for a message that is sent.

    Attributes:
      client: The Redis they are kept on.
    """

    def __init__(self, middleware: Deduplication, actor: Actor[..., Any]) -> None:
        self._actor = actor
        self._terms = terms_of(actor)
        self._keys = middleware.keys
        self.client: redis.Redis = self._keys._claim.registered_client
        self._reserved: list[_Reserved] = []

    def claim(self, messages: Sequence[tuple[int, Message[Any]]]) -> dict[int, SkipEnqueue]:
        """Reserve the key of each message, for seconds; returns why some are to be dropped, by their place.

        Raises:
          UnusableArguments: When the arguments of one make no key; none is reserved.
          StoreUnavailable: When Redis does not answer; what was reserved is free again within seconds.
        """
        terms = self._terms
        if terms is None or not messages:
            return {}
        keys = [key_of(self._actor, message, terms) for _, message in messages]
        with failing_the_message(), self.client.pipeline(transaction=False) as pipeline:
            queued = _Queued(self._keys, pipeline)
            for (_, message), key in zip(messages, keys, strict=True):
                queued.claim(key, message.message_id, "reserved", RESERVED_FOR, again=terms.reschedule_once)
            holders = pipeline.execute()
        skips: dict[int, SkipEnqueue] = {}
        for (place, message), key, holder in zip(messages, keys, holders, strict=True):
            if holder and not waited_for(message):
                skips[place] = SkipEnqueue("deduplicated", duplicate_of=_text(holder))
                continue
            message.options[STANDING] = CLAIMED
            if not holder:
                self._reserved.append(_Reserved(key, message.message_id, terms.ttl))
        return skips

    def confirm(self, pipeline: Pipeline, messages: Sequence[Message[Any]]) -> None:
        """Queue in the pipeline that what was reserved for these messages is in the queue."""
        enqueued = {message.message_id for message in messages}
        queued = _Queued(self._keys, pipeline)
        for each in self._reserved:
            if each.message_id in enqueued:
                queued.confirm(each.key, each.message_id, each.ttl)

    def confirm_by_themselves(self, messages: Sequence[Message[Any]]) -> None:
        """The same in a round trip of its own.

        Raises:
          RedisUnavailable: When Redis does not answer; the keys are free before their messages have ended.
        """
        with reaching_redis(), self.client.pipeline(transaction=False) as pipeline:
            self.confirm(pipeline, messages)
            pipeline.execute()

    def on_the_redis_of(self, other: redis.Redis) -> bool:
        """Whether the other client speaks to the same database of the same server, as far as their settings tell."""
        if self.client is other:
            return True
        ours, theirs = (client.connection_pool.connection_kwargs for client in (self.client, other))
        place = ("host", "port", "path", "db")
        return all(ours.get(part) == theirs.get(part) for part in place)


def _text(value: bytes | str) -> str:
    return value.decode() if isinstance(value, bytes) else value
