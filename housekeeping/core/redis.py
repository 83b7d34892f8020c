"""The shared Redis client, which never repeats a command by itself, and a rate limit that all processes share."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar
from uuid import uuid4

from housekeeping.core.clock import REDIS, SYSTEM_CLOCK, ClockSkew
from housekeeping.core.errors import DeclarationError, RedisFull, RedisUnavailable, ServerUnavailable, SettingsError
from housekeeping.core.logs import error_line
from housekeeping.core.settings import PREFIX, Settings

if TYPE_CHECKING:
    import redis


T = TypeVar("T")

_ENCODER: Final = json.JSONEncoder(separators=(",", ":"))

#: Errors of a command, or of a script with arguments that it cannot use. Redis before 7 names the script differently.
_REJECTED: Final = re.compile(
    r"(?:Command # .* of pipeline caused error: )?(?:WRONGTYPE|@?user_script:|Error running script)", re.DOTALL
)
#: The run continues without a replica after that. One that works answers within milliseconds.
_REPLICATED_MS: Final = 1000


def redis_client(url: str) -> redis.Redis:
    """Return a client for `url`; it connects with its first command.

    redis-py's own retries are off. It repeats a command whose answer was lost, and a repeated command can enqueue a
    message twice or lose one. Callers that may safely repeat use `retry_on_outage`.

    Raises:
      SettingsError: If redis-py cannot parse the URL.
    """
    from housekeeping.core.redis_internals import client_for

    try:
        client = client_for(url)
        # Does not connect. It raises here, and not at the first command, if redis-py does not know a URL parameter.
        client.connection_pool.make_connection()
    except (ValueError, TypeError) as error:
        raise SettingsError(f"HOUSEKEEPING_REDIS_URL: redis-py says: {error_line(error)}") from None
    return client


def translate_redis_errors() -> AbstractContextManager[None]:
    """Raise `RedisUnavailable`, with a message of one line, in place of redis-py's errors."""
    return _TRANSLATION


class _Translation:  # not a generator, which takes several times as long: each message has some of these blocks
    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if error is None:
            return
        import redis

        if isinstance(error, redis.RedisError):
            did = "rejects the command" if is_rejection(error) else "did not answer"
            raise _unavailable(error, did) from error


_TRANSLATION: Final = _Translation()


def is_rejection(error: BaseException | None) -> bool:
    """Return whether Redis rejects a command for good, such as for a key of another type; also if that is its cause."""
    import redis
    from redis.exceptions import ClusterCrossSlotError, NoPermissionError

    for_good = (redis.DataError, NoPermissionError, ClusterCrossSlotError)
    while error is not None:
        if isinstance(error, for_good) or (isinstance(error, redis.ResponseError) and _REJECTED.match(str(error))):
            return True
        error = error.__cause__
    return False


def _unavailable(error: redis.RedisError, did: str) -> RedisUnavailable:
    """Return the error to raise: RedisFull if the disk of Redis (MISCONF) or its memory is full."""
    import redis

    if isinstance(error, redis.OutOfMemoryError) or str(error).startswith("MISCONF"):
        # Redis explains its settings after the first sentence.
        return RedisFull(f"Redis is full: {error_line(error).partition('. ')[0].rstrip('.')}")
    return RedisUnavailable(f"Redis {did}: {error_line(error).rstrip('.')}")


def why_rejected(client: redis.Redis, namespace: str) -> RedisUnavailable | None:
    """Return why Redis rejects writes although it answers; None if it accepts them, or does not answer.

    It is full or a replica, has too few replicas, or its user may not write.

    Without writes there are no heartbeats, so all processes would look dead.
    """
    import redis

    from housekeeping.core.redis_internals import DemotedServer

    try:
        # Only if the key is there, which it never is: rejected like any other write, and without an effect.
        client.set(f"{namespace}:probe", "", xx=True)
    except (redis.ResponseError, DemotedServer) as error:
        return _unavailable(error, "rejects writes")
    except redis.RedisError:
        return None
    return None


def retry_on_outage(step: Callable[[], T], tries: int = 3, pause_s: float = 1.0) -> T:
    """Call a function that is safe to repeat, and retry it after a pause while Redis, or another server, is down.

    Use it to release keys when work is done. A key that is not released blocks others until its TTL expires.

    Raises:
      RedisUnavailable, ServerUnavailable: The last attempt failed as well, or Redis rejects the command for good.
    """
    for _ in range(tries - 1):
        try:
            with translate_redis_errors():
                return step()
        except ServerUnavailable as error:
            if is_rejection(error):
                raise
            time.sleep(pause_s)
    with translate_redis_errors():
        return step()


def read_each(
    client: redis.Redis, names: Sequence[Any], read: Callable[[Any, Any], object]
) -> Iterator[tuple[str, Any, int]]:
    """Yield the keys with the answer to a command and their remaining milliseconds, in one round trip.

    Keys of another type are left out, because they belong to another program.

    Parameters:
      read: Adds the command for a key to a pipeline.

    Raises:
      redis.RedisError: Redis does not answer.
    """
    import redis

    with client.pipeline(transaction=False) as pipeline:
        for name in names:
            read(pipeline, name)
            pipeline.pttl(name)
        answers = iter(pipeline.execute(raise_on_error=False))
    for name, found, left in zip(names, answers, answers, strict=True):
        if isinstance(found, redis.ResponseError) and str(found).startswith("WRONGTYPE"):
            continue
        for answer in (found, left):
            if isinstance(answer, redis.RedisError):
                raise answer
        yield text(name), found, left


def read_scripts(module: str) -> dict[str, str]:
    """Return the Lua scripts in the file beside a module, by their names.

    The line ``--- name`` begins a script. A script is run by `redis.Redis.register_script`.

    Parameters:
      module: The module's ``__file__``.
    """
    source = Path(module).with_suffix(".lua").read_text(encoding="utf-8")
    _, *scripts = f"\n{source}".split("\n--- ")
    return {name: script for name, _, script in (each.partition("\n") for each in scripts)}


#: Begins a script that gets its arguments by name, in one JSON object.
GIVEN: Final = "local given = cjson.decode(ARGV[1])\n"


def named(**arguments: object) -> str:
    """Return the argument of a script that begins with `GIVEN`; those that are None or False are left out."""
    return _ENCODER.encode(
        {name: value for name, value in arguments.items() if value is not None and value is not False}
    )


def fill(script: str, **parts: str) -> str:
    """Return a script with other scripts in place of ``--[[name]]``."""
    for name, part in parts.items():
        script = script.replace(f"--[[{name}]]", f"\n{part}\n")
    return script


def register_freeing_script(client: redis.Redis, source: str) -> Callable[..., Any]:
    """Return a Lua script that also runs when Redis has reached its ``maxmemory``.

    Use it to process messages, because that frees the memory that they take. A full Redis rejects only the first write
    of a script, and no deletion. So a rejected script has changed nothing, and is repeated after a deletion.
    """
    import redis

    script: Any = client.register_script(source)
    although_full: Any = client.register_script(f'redis.call("del", KEYS[1] .. ":none")\n{source}')

    def run(keys: list[Any], args: list[Any]) -> Any:
        try:
            return script(keys=keys, args=args)
        except redis.OutOfMemoryError:
            return although_full(keys=keys, args=args)

    return run


def run_replicated(client: redis.Redis, command: Callable[[redis.Redis], Any]) -> Any:
    """Return the answer of a command; behind Sentinel, wait up to a second until a replica has what it wrote.

    Use it for data that only Redis has, because a failover undoes what no replica has.

    Parameters:
      command: Sends one command to the client, or pipeline, that it is given.
    """
    if not hasattr(getattr(client, "connection_pool", None), "sentinel_manager"):
        return command(client)
    with client.pipeline(transaction=False) as pipeline:
        command(pipeline)
        pipeline.wait(1, _REPLICATED_MS)
        answer, _ = pipeline.execute()
    return answer


def text(value: bytes | str | int | None) -> str:
    """Return an answer of Redis as text, decoded or not; an answer that is no text is an empty string."""
    return (
        value.decode(errors="backslashreplace") if isinstance(value, bytes) else value if isinstance(value, str) else ""
    )


def is_storable(text: str) -> bool:
    """Return whether scripts of Redis and PostgreSQL accept a text: without NUL characters and lone surrogates."""
    return "\0" not in text and (text.isascii() or text == text.encode(errors="ignore").decode())


def milliseconds(length: timedelta) -> int:
    """Return a duration in whole milliseconds, the unit of Redis."""
    return int(length.total_seconds() * 1000)


class SharedRedis:
    """The client and key prefix that leases and middleware use by default."""

    def __init__(self) -> None:
        self.client: redis.Redis | None = None
        #: Whether `use` was called for an installation without Redis.
        self.is_absent = False
        self._namespace: str | None = None

    @property
    def namespace(self) -> str:
        """Prefix of every key; read from the environment unless `use` was called.

        Raises:
          SettingsError: If the environment is read and a setting is wrong.
        """
        if self._namespace is None:
            self._namespace = Settings.load().namespace
        return self._namespace

    def use(self, client: redis.Redis | None, namespace: str) -> None:
        """Set the shared client and prefix; called once, when the application starts.

        Parameters:
          client: None if PostgreSQL is the only server.
        """
        self.client, self._namespace, self.is_absent = client, namespace, client is None

    def is_replaced(self, settings: Settings) -> bool:
        """Return whether PostgreSQL is the only server: no Redis and no broker is configured, and no client is shared.

        Leases, ticks and heartbeats are then in the ledger of the database ``main``.
        """
        no_url = settings.redis_url is None and settings.broker_url is None
        return no_url and settings.database_url is not None and self.client is None

    def get(self) -> redis.Redis:
        """Return the shared client; create it from the settings unless `use` was called.

        Raises:
          SettingsError: If there is no client and ``HOUSEKEEPING_REDIS_URL`` is not set.
        """
        if self.client is None:
            if self.is_absent:
                raise SettingsError(f"{PREFIX}REDIS_URL is not set, and this needs Redis")
            settings = Settings.load()
            self.use(redis_client(settings.require_redis_url()), settings.namespace)
        assert self.client is not None
        return self.client


shared_redis = SharedRedis()

_ALLOW: Final = read_scripts(__file__)["allow"]


def throttle(key: str, count: int, period: timedelta, client: redis.Redis | None = None) -> bool:
    """Return whether the caller may proceed: at most `count` times in any `period`. A refusal is not counted.

    Raises:
      DeclarationError: If the count is below 1 or the period is below a millisecond.
      RedisUnavailable: If Redis did not answer; the call may have been counted.
    """
    if count < 1 or period < timedelta(milliseconds=1):
        raise DeclarationError(f"throttle {key!r}: {count} times in {period} cannot work; for example 10 in one minute")
    client = client or shared_redis.get()
    arguments: list[Any] = [uuid4().hex, count, milliseconds(period)]
    with translate_redis_errors():
        return bool(client.eval(_ALLOW, 1, f"{shared_redis.namespace}:throttle:{key}", *arguments))


def read_redis_clock(client: redis.Redis | None = None) -> ClockSkew:
    """Compare this machine's clock with that of Redis; one round trip.

    Parameters:
      client: By default the shared client.

    Raises:
      RedisUnavailable: When Redis does not answer.
    """
    before = SYSTEM_CLOCK.now()
    with translate_redis_errors():
        seconds, micro = (client or shared_redis.get()).time()
    at = datetime.fromtimestamp(seconds, UTC) + timedelta(microseconds=micro)
    return ClockSkew.between(before, at, SYSTEM_CLOCK.now(), REDIS)
