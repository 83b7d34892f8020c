"""redis-py's client: it never repeats a command by itself, finds a primary by Sentinel, and rejects replicas.

It also measures how long each thread waits for Redis. Private parts of redis-py are used here and in no other module.
Only code that connects imports this module. redis-py takes longer to import than most commands take to run.
"""

from __future__ import annotations

import os
import re
import time
from collections import deque
from collections.abc import Callable
from functools import cache
from typing import Any, Final, cast

import redis
from redis.backoff import NoBackoff
from redis.commands.core import Script
from redis.connection import ConnectionPool, DefaultParser, parse_url
from redis.retry import Retry
from redis.sentinel import MasterNotFoundError, Sentinel

from housekeeping.core.clock import PATIENCE_S, contacting, is_impatient
from housekeeping.core.errors import SettingsError
from housekeeping.core.logs import error_line
from housekeeping.core.telemetry import waiting_for
from housekeeping.core.urls import NO_CLUSTER, is_sentinel_url, parse_sentinel_url

#: A Sentinel answers within milliseconds, and there are others if it does not.
_SENTINEL_TIMEOUT_S: Final = 1
_IN_SCRIPT: Final = re.compile(r"Error running script .*?: -([A-Z]+ .*)", re.DOTALL)


class DemotedServer(redis.ConnectionError):
    """A connection's server has become a replica."""


def sentinel_client(url: str, client_class: type[redis.Redis], options: dict[str, Any]) -> redis.Redis:
    """Return a client of the primary that the URL's Sentinels name; each of its connections asks them for the address.

    Parameters:
      options: redis-py's, unless the URL has other values.

    Raises:
      ValueError, TypeError: If the URL is malformed or has a parameter that redis-py does not know.
    """
    parsed = parse_sentinel_url(url)
    given: dict[str, Any] = options | parse_url(parsed.server_url)
    del given["host"]
    encrypted = given.pop("connection_class", None) is not None
    tls = {name: value for name, value in given.items() if name.startswith("ssl_")} | {"ssl": encrypted}
    timeouts = dict.fromkeys(("socket_timeout", "socket_connect_timeout"), _SENTINEL_TIMEOUT_S)
    own = {"retry": options["retry"], **timeouts, **tls, **parsed.sentinel_login}
    sentinel = _Sentinel(parsed.sentinels, sentinel_kwargs=own)
    for each in sentinel.sentinels:
        _check_connections(each, _check_sentinel)
    client: redis.Redis = sentinel.master_for(parsed.service, client_class, ssl=encrypted, **given)
    _check_connections(client, _check_primary)
    return client


def reject_cluster(client: Any) -> None:
    """Let a client raise SettingsError when it connects to a node of a Redis Cluster, or to a Sentinel.

    The check costs no round trip, because the answer to redis-py's ``HELLO`` has the mode. Without that answer
    (``protocol=2``, redis-py before 8) any server is accepted.

    Raises:
      SettingsError: If the client is one for Redis Cluster.
    """
    if isinstance(client, redis.RedisCluster):
        raise SettingsError(f"the broker's client is a RedisCluster, and {NO_CLUSTER}")
    _check_connections(client, _check_server)


def _check_connections(client: Any, check: Callable[[Any], None]) -> None:
    pool = client.connection_pool
    if not hasattr(pool.connection_class, "checked"):
        pool.connection_class = _checking(pool.connection_class, check)


@cache
def _checking(kind: Any, check: Callable[[Any], None]) -> Any:
    """Return a class of connections that call the check when they are open."""

    # redis-py before 6 calls another method.
    name = "on_connect_check_health" if hasattr(kind, "on_connect_check_health") else "on_connect"

    def on_connect(self: Any, *args: Any, **options: Any) -> None:
        getattr(kind, name)(self, *args, **options)
        try:
            check(self)
        except BaseException:
            self.disconnect()
            raise

    def read_response(self: Any, *args: Any, **options: Any) -> Any:
        try:
            return kind.read_response(self, *args, **options)
        except redis.ResponseError as error:
            of_command = _of_command(error)
            if isinstance(of_command, redis.ReadOnlyError):
                # A failover made it a replica without closing its connections. The address may lead to another server
                # now.
                self.disconnect()
                raise DemotedServer(f"Redis at {_address(self)} is not a primary, but a replica") from error
            raise of_command from None

    own = {name: on_connect, "read_response": read_response, "checked": True}
    return type(kind.__name__, (kind,), own)


def _of_command(error: redis.ResponseError) -> Exception:
    """Return the error of the command in a script, which is a part of the script's text before Redis 7."""
    found = _IN_SCRIPT.match(str(error))
    parser: Any = DefaultParser
    return error if found is None else cast(Exception, parser.parse_error(found[1]))


def _check_server(connection: Any) -> None:
    mode = _told(connection, "mode")
    if mode == "cluster":
        raise SettingsError(f"Redis at {_address(connection)} is a node of a Redis Cluster, and {NO_CLUSTER}")
    if mode == "sentinel":
        address = _address(connection)
        raise SettingsError(f"{address} is a Sentinel, whose URL is redis+sentinel://{address}/service/0")


def _check_primary(connection: Any) -> None:
    _check_server(connection)
    # For some seconds after a failover, Sentinels can name a server that is a replica by now.
    if (role := _told(connection, "role")) not in ("master", "primary", ""):
        raise redis.ConnectionError(f"Redis at {_address(connection)} is not a primary, but a {role}")


def _check_sentinel(connection: Any) -> None:
    if _told(connection, "mode") not in ("sentinel", ""):
        address = _address(connection)
        raise SettingsError(f"{address} is not a Sentinel, but a Redis server; Sentinels usually have the port 26379")


class _Sentinel(Sentinel):
    """redis-py's class, for several threads at once, and with errors of one line."""

    def discover_master(self, service_name: str) -> tuple[str, int]:
        causes = []
        for sentinel in self.sentinels:
            try:
                services: Any = sentinel.sentinel_masters()
            except redis.RedisError as error:
                causes.append(error_line(error))
                continue
            state = services.get(service_name)
            if state and self.check_master_state(state, service_name):
                # First next time. redis-py swaps two entries of its list, and threads that do so at once lose one.
                self.sentinels = [sentinel, *(each for each in self.sentinels if each is not sentinel)]
                return state["ip"], state["port"]
            causes.append("its primary is down, and no other is elected yet" if state else "it is not monitored")
        why = "; ".join(dict.fromkeys(causes))
        raise MasterNotFoundError(f"Sentinel names no primary of the service {service_name!r}: {why}")


def _told(connection: Any, name: str) -> str:
    """Return a field of the answer to HELLO; an empty string without one."""
    answer = connection.handshake_metadata
    value = (answer.get(name.encode()) or answer.get(name)) if isinstance(answer, dict) else None
    return value.decode() if isinstance(value, bytes) else str(value or "")


def _address(connection: Any) -> str:
    if path := getattr(connection, "path", None):
        return str(path)
    return (
        f"[{connection.host}]:{connection.port}" if ":" in connection.host else f"{connection.host}:{connection.port}"
    )


#: A connection that was idle for longer is checked before its next script: the server may have closed it.
_CHECK_AFTER_S: Final = 0.01


_TIMEOUT_S: Final = 5


def client_for(url: str) -> redis.Redis:
    """Return a client that connects with its first command; see `redis_client`."""
    timeout_s = PATIENCE_S if is_impatient() else _TIMEOUT_S
    options: dict[str, Any] = {
        "retry": Retry(NoBackoff(), 0),
        "socket_timeout": timeout_s,
        "socket_connect_timeout": timeout_s,
        "health_check_interval": 30,
    }
    if is_sentinel_url(url):
        return sentinel_client(url, _TimedRedis, options)
    client: redis.Redis = _TimedRedis.from_url(url, **options)
    reject_cluster(client)
    return client


#: An answer did not come, or not whole.
_NO_ANSWER: Final = (redis.ConnectionError, redis.TimeoutError)


def _server(pool: Any) -> str:
    """Return which server the connections of a pool lead to."""
    given = pool.connection_kwargs
    names = (getattr(pool, "service_name", ""), *(given.get(name, "") for name in ("host", "port", "path")))
    return f"Redis {names}"


class _TimedRedis(redis.Redis):
    """redis-py's client that measures how long each thread waits for Redis, see `waiting_for`.

    Scripts have connections of their own, which stay with this client. redis-py's pool spends three times as long on a
    connection for each command as on the command itself.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._idle: deque[tuple[Any, float]] = deque()  # connections of scripts, and when each was used last
        self._server = _server(self.connection_pool)
        self._encoding: str = self.get_encoder().encoding

    def execute_command(self, *args: Any, **options: Any) -> Any:
        with contacting(self._server, _NO_ANSWER), waiting_for("redis"):
            return super().execute_command(*args, **options)

    def pipeline(self, transaction: bool = True, shard_hint: Any = None) -> Any:
        return _TimedPipeline(self.connection_pool, self.response_callbacks, transaction, shard_hint)

    def evalsha(self, sha: str, numkeys: int, *keys_and_args: Any) -> Any:
        # Not a subclass of the pool: Sentinel's, for one, chooses a server for each command.
        if type(self.connection_pool) is not ConnectionPool:
            return super().evalsha(sha, numkeys, *keys_and_args)
        with contacting(self._server, _NO_ANSWER), waiting_for("redis"):
            return self._evaluate(_packed(self._encoding, "EVALSHA", sha, numkeys, *keys_and_args))

    def register_script(self, script: Any) -> Script:
        return _Script(self, script)

    def _evaluate(self, command: bytes) -> Any:
        connection = self._connection_for_script()
        answered = False
        try:
            connection.send_packed_command([command])
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
        # redis-py before 8 has no `is_connected`.
        if time.monotonic() - used_at > _CHECK_AFTER_S and connection._sock is not None:
            try:
                if connection.can_read():
                    connection.disconnect()
            except redis.ConnectionError:
                connection.disconnect()  # closed by the server; it connects again with its next command
        return connection


class _Script(Script):
    """redis-py's script, without the search for a pipeline, which takes as long as sending the script."""

    def __call__(self, keys: Any = (), args: Any = (), client: Any = None) -> Any:
        if client is not None:
            return super().__call__(keys, args, client)
        try:
            return self.registered_client.evalsha(self.sha, len(keys), *keys, *args)
        except redis.exceptions.NoScriptError:
            self.registered_client.script_load(self.script)
            return self.registered_client.evalsha(self.sha, len(keys), *keys, *args)


def _packed(encoding: str, *words: bytes | str | int) -> bytes:
    """Return a command as it is sent, in a third of the time that redis-py takes."""
    parts = [b"*%d\r\n" % len(words)]
    for word in words:
        encoded = word if type(word) is bytes else str(word).encode(encoding)
        parts.append(b"$%d\r\n%b\r\n" % (len(encoded), encoded))
    return b"".join(parts)


class _TimedPipeline(redis.client.Pipeline):
    def execute(self, raise_on_error: bool = True) -> list[Any]:
        with contacting(_server(self.connection_pool), _NO_ANSWER), waiting_for("redis"):
            return super().execute(raise_on_error)
