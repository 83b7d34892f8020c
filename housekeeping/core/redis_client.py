"""The one Redis connection pool, made so that what it does is what was asked, once."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from housekeeping.core.errors import RedisUnavailable, SettingsError
from housekeeping.core.sanitize import error_line
from housekeeping.core.settings import Settings
from housekeeping.core.telemetry.io_timing import waiting_for

T = TypeVar("T")


class TimedRedis(redis.Redis):
    """redis-py's client, whose waiting is counted, see `timings`."""

    def execute_command(self, *args: Any, **options: Any) -> Any:
        with waiting_for("redis"):
            return super().execute_command(*args, **options)

    def pipeline(self, transaction: bool = True, shard_hint: Any = None) -> Any:
        return _TimedPipeline(self.connection_pool, self.response_callbacks, transaction, shard_hint)


class _TimedPipeline(redis.client.Pipeline):
    def execute(self, raise_on_error: bool = True) -> list[Any]:
        with waiting_for("redis"):
            return super().execute(raise_on_error)


def redis_client(url: str) -> redis.Redis:
    """A client for `url`; nothing is connected before the first command.

    redis-py's own retries are off: it repeats a command whose answer was lost, and a repeated
    command may enqueue a message twice or lose one. Whoever may safely repeat says so itself.

    Raises:
      SettingsError: When redis-py cannot read the URL.
    """
    try:
        client: redis.Redis = TimedRedis.from_url(
            url, retry=Retry(NoBackoff(), 0), socket_timeout=5, socket_connect_timeout=5, health_check_interval=30
        )
        # Made, not connected: a parameter that redis-py does not know shows here, and not with the first command.
        client.connection_pool.make_connection()
    except (ValueError, TypeError) as error:
        raise SettingsError(f"HOUSEKEEPING_REDIS_URL: redis-py says: {error_line(error)}") from None
    return client


@contextmanager
def translate_redis_errors() -> Iterator[None]:
    """Turn redis-py's errors into `RedisUnavailable`, in one line."""
    try:
        yield
    except redis.RedisError as error:
        raise RedisUnavailable(f"Redis did not answer: {error_line(error)}") from error


def retry_redis(step: Callable[[], T], tries: int = 3, pause_s: float = 1.0) -> T:
    """Do a step that may be repeated, again after a pause when Redis does not answer.

    For what a process says when its work is done: unsaid, others would wait until a ttl is over.

    Raises:
      RedisUnavailable: When the last try got no answer either.
    """
    for _ in range(tries - 1):
        try:
            with translate_redis_errors():
                return step()
        except RedisUnavailable:
            time.sleep(pause_s)
    with translate_redis_errors():
        return step()


class SharedRedis:
    """The client and key prefix that leases and middleware use unless given their own."""

    def __init__(self) -> None:
        self.client: redis.Redis | None = None
        self._namespace: str | None = None

    @property
    def namespace(self) -> str:
        """The prefix of every key; the environment's when nobody has composed an application.

        Raises:
          SettingsError: When the environment has to be asked and a setting is wrong.
        """
        if self._namespace is None:
            self._namespace = Settings.load().namespace
        return self._namespace

    def use(self, client: redis.Redis, namespace: str) -> None:
        """Make this the shared client; called once by whoever composes the application."""
        self.client, self._namespace = client, namespace

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
