"""redis-py client on a `RedisStore`. Every command and pipeline is one point of I/O."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any, Final

import redis
from redis.client import Pipeline

from tests.simulator.redis_keyspace import Reply
from tests.simulator.redis_scripts import evaluate
from tests.simulator.redis_store import RedisStore

#: Conversions of answers by redis-py.
_SHAPES: Final[dict[str, Callable[[Any], Any]]] = {
    "SMEMBERS": set,
    "TIME": lambda reply: (int(reply[0]), int(reply[1])),
    "HGETALL": lambda reply: dict(zip(reply[::2], reply[1::2], strict=True)),
    "ZSCORE": lambda reply: None if reply is None else float(reply),
    "PEXPIRE": bool,
    "EXPIRE": bool,
    "PERSIST": bool,
}
#: Function that makes a round trip, given its name and effect.
Trip = Callable[[str, Callable[[], Any]], Any]


class SimulatedRedis(redis.Redis):
    """Client of the simulated server.

    Parameters:
      store: Asked for at each command, because every schedule has a new one.
      trip: Does the I/O.
    """

    def __init__(self, store: Callable[[], RedisStore], trip: Trip) -> None:
        super().__init__()
        self.store, self.trip = store, trip

    def execute_command(self, *args: Any, **options: Any) -> Any:
        return self.trip(_name(args), lambda: perform(self.store(), args))

    def pipeline(self, transaction: bool = True, shard_hint: str | None = None) -> SimulatedPipeline:
        return SimulatedPipeline(self, transaction)

    def register_script(self, script: Any) -> Any:
        return SimulatedScript(self, script)


class SimulatedPipeline(Pipeline):
    """Pipeline of the simulated server.

    Note: Without a transaction others may come in between on a real server; here they do not. No part of
    the library reads in such a pipeline what it writes there.
    """

    def __init__(self, client: SimulatedRedis, transaction: bool) -> None:
        self._client = client
        self._commands: list[tuple[Any, ...]] = []
        self.explicit_transaction = transaction

    def execute_command(self, *args: Any, **options: Any) -> SimulatedPipeline:
        self._commands.append(args)
        return self

    def execute(self, raise_on_error: bool = True) -> list[Any]:
        commands, self._commands = self._commands, []
        if not commands:
            return []
        name = f"pipeline of {len(commands)} from {_name(commands[0])}"
        answers: list[Any] = self._client.trip(
            name, lambda: [perform(self._client.store(), command) for command in commands]
        )
        return answers

    def reset(self) -> Any:
        self._commands = []

    def __len__(self) -> int:
        return len(self._commands)

    def __bool__(self) -> bool:
        return True

    def __del__(self) -> None:
        pass


class SimulatedScript:
    """Result of `register_script`. Every call sends the script's text."""

    def __init__(self, client: SimulatedRedis, script: bytes | str) -> None:
        self.registered_client = client
        self.script = _one_of_each(script)
        self.sha = hashlib.sha1(self.script).hexdigest()

    def __call__(self, keys: Sequence[Any] = (), args: Iterable[Any] = (), client: Any = None) -> Any:
        client = self.registered_client if client is None else client
        return client.execute_command("EVAL", self.script, len(keys), *keys, *args)


@cache
def _one_of_each(script: bytes | str) -> bytes:
    # The same object is found in the cache of compiled scripts without a comparison.
    return script if isinstance(script, bytes) else script.encode()


def perform(store: RedisStore, command: Sequence[Any]) -> Reply:
    """Return the server's answer as redis-py does."""
    name = str(command[0]).upper()
    if name == "EVAL":
        _, script, number, *rest = command
        return evaluate(store, script, rest[: int(number)], rest[int(number) :])
    reply = store.call(*command)
    return _SHAPES[name](reply) if name in _SHAPES else reply


def _name(command: Sequence[Any]) -> str:
    """Return command and key, short enough for a history line."""
    if command[0] != "EVAL":
        return " ".join(str(part) for part in command[:2])
    _, _, number, *rest = command
    key, first = str(rest[0]), rest[int(number)] if len(rest) > int(number) else ""
    return f"script {key} {str(first)[:40]}"
