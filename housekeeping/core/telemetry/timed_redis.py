"""redis-py's client, which never repeats a command by itself and measures how long each thread waits for Redis.

Only code that connects imports this module. redis-py takes longer to import than most commands take to run.
"""

from __future__ import annotations

from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from housekeeping.core.telemetry.context import waiting_for


def client_for(url: str) -> redis.Redis:
    """Return a client that connects with its first command; see `redis_client`."""
    client: redis.Redis = _TimedRedis.from_url(
        url, retry=Retry(NoBackoff(), 0), socket_timeout=5, socket_connect_timeout=5, health_check_interval=30
    )
    return client


class _TimedRedis(redis.Redis):
    def execute_command(self, *args: Any, **options: Any) -> Any:
        with waiting_for("redis"):
            return super().execute_command(*args, **options)

    def pipeline(self, transaction: bool = True, shard_hint: Any = None) -> Any:
        return _TimedPipeline(self.connection_pool, self.response_callbacks, transaction, shard_hint)


class _TimedPipeline(redis.client.Pipeline):
    def execute(self, raise_on_error: bool = True) -> list[Any]:
        with waiting_for("redis"):
            return super().execute(raise_on_error)
