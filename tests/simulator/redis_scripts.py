"""Interpreter of the library's and Dramatiq's Lua scripts on a `RedisStore`."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any, Final

from lupa import lua51
from redis.exceptions import ResponseError

from tests.simulator.redis_keyspace import Reply, as_bytes
from tests.simulator.redis_store import RedisStore

#: The Lua version of Redis.
_LUA: Final = lua51.LuaRuntime(encoding=None, register_eval=False, unpack_returned_tuples=False)
_OK: Final = _LUA.table_from({b"ok": b"OK"})
_SHA1HEX: Final = _LUA.eval(b"function(hex) return function(text) return hex(text) end end")(
    lambda text: hashlib.sha1(text, usedforsecurity=False).hexdigest().encode()
)
_TABLE_OF: Final = _LUA.eval(b"function(...) return {...} end")
#: A script as a Lua function, because tables are faster to build in Lua.
_TAKING_ARGUMENTS: Final = _LUA.eval(b"""
function(script)
    return function(redis, keys, ...)
        local KEYS, ARGV = {}, {...}
        for i = 1, keys do KEYS[i] = table.remove(ARGV, 1) end
        return script(redis, KEYS, ARGV)
    end
end
""")
_compiled: Final[dict[bytes, Any]] = {}


def _from_json(value: Any) -> Any:
    """Return a decoded JSON value as a Lua value."""
    if isinstance(value, dict):
        return _LUA.table_from({name.encode(): _from_json(each) for name, each in value.items()})
    if isinstance(value, list):
        return _TABLE_OF(*map(_from_json, value))
    return value.encode() if isinstance(value, str) else value


_LUA.globals()[b"cjson"] = _LUA.table_from({b"decode": lambda text: _from_json(json.loads(text))})


def evaluate(store: RedisStore, script: bytes | str, keys: Sequence[Any], args: Sequence[Any]) -> Reply:
    """Run a script atomically and return its result.

    Raises:
      ResponseError: When a command in it was refused.
    """
    text = script if isinstance(script, bytes) else script.encode()
    function = _compiled.get(text)
    if function is None:
        script_itself = _LUA.eval(b"function(redis, KEYS, ARGV) " + text + b"\nend")
        function = _compiled[text] = _TAKING_ARGUMENTS(script_itself)

    api = store.scripts_api
    if api is None:

        def call(*command: Any) -> Any:
            reply = store.call(*command)
            kind = type(reply)
            return reply if kind is bytes or kind is int else _to_lua(reply)

        api = store.scripts_api = _LUA.table_from({b"call": call, b"sha1hex": _SHA1HEX})
    return _from_lua(function(api, len(keys), *map(as_bytes, keys), *map(as_bytes, args)))


def _to_lua(reply: Reply) -> Any:
    if reply is None:
        return False
    if reply is True:
        return _OK
    if isinstance(reply, list):
        return _TABLE_OF(*map(_to_lua, reply))
    return reply


def _from_lua(value: Any) -> Reply:
    kind = type(value)
    if kind is bytes or kind is int:
        return value
    if value is None or value is False:
        return None
    if value is True:
        return 1
    if kind is float:
        return int(value)
    if lua51.lua_type(value) == "table":
        if value[b"err"] is not None:
            raise ResponseError(value[b"err"].decode())
        if value[b"ok"] is not None:
            return value[b"ok"]
        return [_from_lua(each) for each in _until_nil(value)]
    return value


def _until_nil(table: Any) -> list[Any]:
    found: list[Any] = []
    while (each := table[len(found) + 1]) is not None:
        found.append(each)
    return found
