"""The ready-made application's broker, with nothing left to chance."""

from __future__ import annotations

from typing import Any, Final

import redis
from dramatiq import Message
from dramatiq.brokers.redis import MAINTENANCE_SCALE, RedisBroker
from dramatiq.errors import DecodeError

from housekeeping.foundation.db import one_line
from housekeeping.foundation.logs import logger as named_logger
from housekeeping.foundation.redis_client import redis_client
from housekeeping.foundation.settings import Settings

logger = named_logger(__name__)

HEARTBEAT_TIMEOUT_MS: Final = 60_000  # semantics.md, B1: a killed worker's messages run again after this
DEAD_MESSAGE_TTL_MS: Final = 7 * 24 * 3600 * 1000  # Dramatiq's own, said aloud: dead letters are kept for a week


class SoundRedisBroker(RedisBroker):
    """Dramatiq's Redis broker, where a message that cannot be read costs itself only.

    It goes to the dead letters as it is, with an error line; there it is known by its id in Redis. Dramatiq's
    own consumer breaks off at such a message, and leaves those behind it until its process has ended.
    """

    def do_fetch(self, queue_name: str, count: int) -> list[bytes | None]:
        """Take up to `count` messages from the queue for this process; called by Dramatiq's consumer."""
        fetched: list[bytes | None] = self._dispatch("fetch")(queue_name, count)
        unreadable = {body: why for body in fetched if body is not None and (why := _wrong_with(body, queue_name))}
        if unreadable:
            self._bury(queue_name, unreadable)
        return [body for body in fetched if body not in unreadable]

    def _bury(self, queue_name: str, unreadable: dict[bytes, str]) -> None:
        taken = f"{self.namespace}:__acks__.{self.broker_id}.{queue_name}"
        try:
            ids: Any = list(self.client.smembers(taken))
            bodies: Any = self.client.hmget(f"{self.namespace}:{queue_name}.msgs", ids)
            for redis_id, body in zip(ids, bodies, strict=True):
                if body in unreadable:
                    self.do_nack(queue_name, redis_id)
                    logger.error(
                        "Message cannot be read and went to the dead letters",
                        queue=queue_name,
                        redis_message_id=redis_id.decode(),
                        error=unreadable[body],
                    )
        except redis.RedisError as error:
            # They stay with this process, and are looked at again when it has ended.
            logger.error("Unreadable messages could not be moved", queue=queue_name, error=one_line(error))


def redis_broker(settings: Settings) -> RedisBroker:
    """A Redis broker by the settings; it has no middleware yet.

    Raises:
      SettingsError: When no URL is set, or redis-py cannot read it.
    """
    return SoundRedisBroker(
        client=redis_client(settings.broker_url or settings.require_redis_url()),
        namespace=f"{settings.namespace}:broker",
        middleware=[],
        # Each command looks for messages of dead workers; by default 1 in 1000 does, which takes 10 minutes.
        maintenance_chance=MAINTENANCE_SCALE,
        heartbeat_timeout=HEARTBEAT_TIMEOUT_MS,
        dead_message_ttl=DEAD_MESSAGE_TTL_MS,
    )


def _wrong_with(body: bytes, queue_name: str) -> str:
    """Why Dramatiq's consumer would break off at this message; empty when it would not."""
    try:
        message: Message[Any] = Message.decode(body)
    except DecodeError as error:
        return one_line(error.__cause__ or error)
    if not isinstance(message.options, dict) or not isinstance(message.options.get("redis_message_id"), str):
        return "it has no redis_message_id in its options"
    if message.queue_name != queue_name:
        return f"it says that its queue is {message.queue_name!r}"
    return ""
