"""In-memory keys of Redis with their ttls, and the commands for keys and strings.

Answers are as Redis gives them to a script: bytes, numbers, lists, None. Held to the real one by
test_redis_store.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from typing import Any, Final, cast

from redis.exceptions import ResponseError

_WRONG_TYPE: Final = "WRONGTYPE Operation against a key holding the wrong kind of value"

Reply = Any


class Keyspace:
    """Keys of one Redis database.

    Parameters:
      clock: Seconds since the epoch, by the server's clock.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._values: dict[bytes, Any] = {}
        self._expires_ms: dict[bytes, int] = {}
        self._commands: dict[Any, Callable[..., Reply]] = {}
        self.scripts_api: Any = None  # Lua API of this store, made by the first script

    def call(self, *args: Any) -> Reply:
        """Run one command.

        Raises:
          ResponseError: As Redis would refuse it.
        """
        name = args[0]
        command = self._commands.get(name)
        if command is None:
            word = name.decode() if isinstance(name, bytes) else name
            command = self._commands[name] = self._command(word.lower())
        return command(*[arg if type(arg) is bytes else as_bytes(arg) for arg in args[1:]])

    def _command(self, word: str) -> Callable[..., Reply]:
        command: Callable[..., Reply] | None = getattr(self, f"do_{word}", None)
        if command is None:
            raise ResponseError(f"unknown command {word!r}")
        return command

    def clear(self) -> None:
        """Delete everything."""
        self._values.clear()
        self._expires_ms.clear()

    def live_keys(self) -> Iterator[bytes]:
        """Yield every unexpired key."""
        return (key for key in list(self._values) if self._live(key))

    def value(self, key: bytes) -> Any:
        """Return the value of a key, or None."""
        return self._values[key] if self._live(key) else None

    def expires_at(self, key: bytes) -> float | None:
        """Return the expiry of a key by the server's clock; None if it has none."""
        at = self._expires_ms.get(key)
        return None if at is None else at / 1000

    def _ms(self) -> int:
        return int(self._clock() * 1000)

    def _live(self, key: bytes) -> bool:
        expires = self._expires_ms.get(key)
        if expires is None:
            return key in self._values
        if expires <= self._ms():
            self._values.pop(key, None)
            del self._expires_ms[key]
            return False
        return True

    def _typed(self, key: bytes, kind: type) -> Any:
        if not self._live(key):
            return None
        value = self._values[key]
        if not isinstance(value, kind):
            raise ResponseError(_WRONG_TYPE)
        return value

    def _made(self, key: bytes, kind: type) -> Any:
        value = self._typed(key, kind)
        if value is None:
            value = self._values[key] = kind()
        return value

    def _tidy(self, key: bytes) -> None:
        if not self._values[key]:
            self._drop(key)

    def _drop(self, key: bytes) -> int:
        if not self._live(key):
            return 0
        del self._values[key]
        self._expires_ms.pop(key, None)
        return 1

    def do_time(self) -> Reply:
        now = self._ms()
        return [b"%d" % (now // 1000), b"%d" % (now % 1000 * 1000)]

    def do_get(self, key: bytes) -> Reply:
        return self._typed(key, bytes)

    def do_mget(self, *keys: bytes) -> Reply:
        # Redis answers nil for a key that contains no string.
        there = [self._live(key) and self._values[key] for key in keys]
        return [value if isinstance(value, bytes) else None for value in there]

    def do_set(self, key: bytes, value: bytes, *options: bytes) -> Reply:
        asked = [option.lower() for option in options]
        before = self._typed(key, bytes) if b"get" in asked else None
        there = self._live(key)
        refused = (b"nx" in asked and there) or (b"xx" in asked and not there)
        if not refused:
            kept = self._expires_ms.get(key) if b"keepttl" in asked else None
            self._values[key] = value
            self._expires_ms.pop(key, None)
            if kept is not None:
                self._expires_ms[key] = kept
            for unit, factor in ((b"px", 1), (b"ex", 1000)):
                if unit in asked:
                    self._expires_ms[key] = self._ms() + int(options[asked.index(unit) + 1]) * factor
        if b"get" in asked:
            return before
        return None if refused else True

    def do_del(self, *keys: bytes) -> Reply:
        return sum(self._drop(key) for key in keys)

    def do_exists(self, *keys: bytes) -> Reply:
        return sum(self._live(key) for key in keys)

    def do_keys(self, pattern: bytes) -> Reply:
        if pattern.endswith(b"*") and not set(pattern[:-1]) & set(b"*?[\\"):
            return [key for key in self.live_keys() if key.startswith(pattern[:-1])]
        return [key for key in self.live_keys() if fnmatchcase(key.decode(), pattern.decode())]

    def do_pexpire(self, key: bytes, ms: bytes) -> Reply:
        if not self._live(key):
            return 0
        self._expires_ms[key] = self._ms() + int(ms)
        return int(self._live(key) or 1)

    def do_expire(self, key: bytes, seconds: bytes) -> Reply:
        return self.do_pexpire(key, b"%d" % (int(seconds) * 1000))

    def do_pttl(self, key: bytes) -> Reply:
        if not self._live(key):
            return -2
        at = self._expires_ms.get(key)
        return -1 if at is None else at - self._ms()


def as_bytes(value: Any) -> bytes:
    """Return an argument as sent to the server."""
    kind = type(value)
    if kind is bytes:
        return cast(bytes, value)
    if kind is str:
        return cast(bytes, value.encode())
    if isinstance(value, float) and not value.is_integer():
        return b"%.17g" % value
    return b"%d" % int(value)
