"""The ready-made application's broker, with nothing left to chance."""

from __future__ import annotations

from typing import Final

from dramatiq.brokers.redis import MAINTENANCE_SCALE, RedisBroker

from housekeeping.foundation.redis_client import redis_client
from housekeeping.foundation.settings import Settings

HEARTBEAT_TIMEOUT_MS: Final = 60_000  # semantics.md, B1: a killed worker's messages run again after this
DEAD_MESSAGE_TTL_MS: Final = 7 * 24 * 3600 * 1000  # Dramatiq's own, said aloud: dead letters are kept for a week


def redis_broker(settings: Settings) -> RedisBroker:
    """A Redis broker by the settings; it has no middleware yet.

    Raises:
      SettingsError: When no URL is set, or redis-py cannot read it.
    """
    return RedisBroker(
        client=redis_client(settings.broker_url or settings.require_redis_url()),
        namespace=f"{settings.namespace}:broker",
        middleware=[],
        # Each command looks for messages of dead workers; by default 1 in 1000 does, which takes 10 minutes.
        maintenance_chance=MAINTENANCE_SCALE,
        heartbeat_timeout=HEARTBEAT_TIMEOUT_MS,
        dead_message_ttl=DEAD_MESSAGE_TTL_MS,
    )
