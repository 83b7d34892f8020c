"""The one Redis connection pool, made so that what it does is what was asked, once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from housekeeping.foundation.db import one_line
from housekeeping.foundation.errors import RedisUnavailable, SettingsError
from housekeeping.foundation.settings import Settings


def redis_client(url: str) -> redis.Redis:
    """A client for `url`; nothing is connected before the first command.

    redis-py's own retries are off: it repeats a command whose answer was lost, and a repeated
    command may enqueue a message twice or lose one. Whoever may safely repeat says so itself.

    Raises:
      SettingsError: When redis-py cannot read the URL.
    """
    try:
        client: redis.Redis = redis.Redis.from_url(
            url, retry=Retry(NoBackoff(), 0), socket_timeout=5, socket_connect_timeout=5, health_check_interval=30
        )
    except ValueError as error:
        raise SettingsError(f"HOUSEKEEPING_REDIS_URL: redis-py says: {one_line(error)}") from None
    return client


@contextmanager
def reaching_redis() -> Iterator[None]:
    """Turn redis-py's errors into `RedisUnavailable`, in one line."""
    try:
        yield
    except redis.RedisError as error:
        raise RedisUnavailable(f"Redis did not answer: {one_line(error)}") from error


@dataclass(slots=True)
class SharedRedis:
    """The client and key prefix that leases and middleware use unless given their own."""

    client: redis.Redis | None = None
    namespace: str = "housekeeping"

    def use(self, client: redis.Redis, namespace: str) -> None:
        """Make this the shared client; called once by whoever composes the application."""
        self.client, self.namespace = client, namespace

    def get(self) -> redis.Redis:
        """The shared client, made from the settings when nobody has composed an application.

        Raises:
          SettingsError: When there is none and ``HOUSEKEEPING_REDIS_URL`` is not set.
        """
        if self.client is None:
            settings = Settings.load()
            self.use(redis_client(settings.require_redis_url()), settings.namespace)
        assert self.client is not None
        return self.client


shared_redis = SharedRedis()
