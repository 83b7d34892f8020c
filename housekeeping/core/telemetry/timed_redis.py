"""redis-py's client, which never repeats a command by itself and measures how long each thread waits for Redis.

Only code that connects imports this module. redis-py takes longer to import than most commands take to run.
"""

from __future__ import annotations

import os
import time
from collections import deque
from typing import Any, Final

import redis
from redis.backoff import NoBackoff
from redis.connection import ConnectionPool
from redis.retry import Retry

from housekeeping.core.redis.sentinel_url import is_sentinel_url
from housekeeping.core.redis.servers import DemotedServer, reject_cluster, sentinel_client
from housekeeping.core.telemetry.context import waiting_for

#: A connection that was idle for longer is checked before its next script: the server may have closed it.
_CHECK_AFTER_S: Final = 0.01


def client_for(url: str) -> redis.Redis:
    """Return a client that connects with its first command; see `redis_client`."""
    options: dict[str, Any] = {
        "retry": Retry(NoBackoff(), 0),
        "socket_timeout": 5,
        "socket_connect_timeout": 5,
        "health_check_interval": 30,
    }
    if is_sentinel_url(url):
        return sentinel_client(url, _TimedRedis, options)
    client: redis.Redis = _TimedRedis.from_url(url, **options)
    reject_cluster(client)
    return client


class _TimedRedis(redis.Redis):
    """redis-py's client that measures how long each thread waits for Redis, see `io_timing`.

    Scripts have connections of their own, which stay with this client. redis-py's pool spends three times as long on a
    connection for each command as on the command itself.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._idle: deque[tuple[Any, float]] = deque()  # connections of scripts, and when each was used last

    def execute_command(self, *args: Any, **options: Any) -> Any:
        with waiting_for("redis"):
            return super().execute_command(*args, **options)

    def pipeline(self, transaction: bool = True, shard_hint: Any = None) -> Any:
        return _TimedPipeline(self.connection_pool, self.response_callbacks, transaction, shard_hint)

    def _execute_command(self, *args: Any, **options: Any) -> Any:
        # Not a subclass of the pool: Sentinel's, for one, chooses a server for each command.
        if args[0] != "EVALSHA" or type(self.connection_pool) is not ConnectionPool:
            return super()._execute_command(*args, **options)
        connection = self._connection_for_script()
        answered = False
        try:
            connection.send_command(*args)
            answer = connection.read_response()
            answered = True
            return answer
        except redis.ResponseError:
            answered = True
            raise
        except DemotedServer:
            # A replica still accepts SCRIPT LOAD and reads, so the other connections would stay with it.
            self.connection_pool.disconnect(inuse_connections=False)
            raise
        finally:
            if not answered:
                # The answer may still come. It must not be taken for that of the next script.
                connection.disconnect()
            self._idle.append((connection, time.monotonic()))

    def _connection_for_script(self) -> Any:
        try:
            connection, used_at = self._idle.pop()
        except IndexError:
            return self.connection_pool.get_connection()
        if connection.pid != os.getpid():
            return self.connection_pool.get_connection()  # it belongs to the parent of this process
        if time.monotonic() - used_at > _CHECK_AFTER_S and connection.is_connected:
            try:
                if connection.can_read():
                    connection.disconnect()
            except redis.ConnectionError:
                connection.disconnect()  # closed by the server; it connects again with its next command
        return connection


class _TimedPipeline(redis.client.Pipeline):
    def execute(self, raise_on_error: bool = True) -> list[Any]:
        with waiting_for("redis"):
            return super().execute(raise_on_error)
