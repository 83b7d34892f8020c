"""`RedisStore` that records events, and rejects changes of keys by others than their holder."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

from tests.internals.ledger import SILENCE
from tests.simulator.redis_keyspace import Reply
from tests.simulator.redis_store import RedisStore
from tests.simulator.virtual_threads import something_queued
from tests.simulator.workload import SWEEPS
from tests.simulator.world import Process, World

NAMESPACE: Final = "sim"
QUEUE: Final = f"{NAMESPACE}:broker:default".encode()
_OWNED: Final = tuple(f"{NAMESPACE}:{kind}:".encode() for kind in ("lease", "dedup", "running"))
#: Commands that the library uses to change such a key.
_CHANGING: Final = ("set", "del", "hset", "hdel", "pexpire", "expire")
_DEDUP: Final = f"{NAMESPACE}:dedup:".encode()
_LEASE: Final = f"{NAMESPACE}:lease:".encode()
_SWEEP_LEASES: Final = tuple(_LEASE + name.encode() for name in SWEEPS)
_DONE: Final = f"{NAMESPACE}:done:".encode()


@dataclass(frozen=True, slots=True)
class Owner:
    """Holder of a key, with its message and start."""

    process: Process
    message_id: str | None
    since: float


class ObservedStore(RedisStore):
    """Redis server of one world."""

    def __init__(self, world: World) -> None:
        super().__init__(lambda: world.now)
        self._world = world
        self._owners: dict[bytes, Owner] = {}
        self.messages: dict[bytes, dict[str, Any]] = {}  # by id in Redis
        self.emptied_at: list[float] = []

    def clear(self) -> None:
        super().clear()
        self.emptied_at.append(self._world.now)
        self._world.note("redis emptied")

    def _command(self, word: str) -> Callable[..., Reply]:
        command = super()._command(word)
        if word not in _CHANGING:
            return command

        def observed(key: bytes, *args: bytes) -> Reply:
            if not key.startswith(_OWNED):
                return command(key, *args)
            before = self._token(key)
            answer = command(key, *args)
            after = self._token(key)
            if before != after:
                self._changed(key, before, after)
            elif word == "pexpire" and before is not None:
                self._prolonged(key, before)
            return answer

        return observed

    def do_hset(self, key: bytes, *pairs: bytes) -> Reply:
        if key.endswith(b".msgs"):
            for redis_id, body in zip(pairs[::2], pairs[1::2], strict=True):
                there = self.do_hexists(key, redis_id)
                self.messages[redis_id] = message = json.loads(body)
                if not there:  # otherwise it moves to the dead letters with its error
                    self._enqueued(key, redis_id, message)
        return super().do_hset(key, *pairs)

    def do_rpush(self, key: bytes, *values: bytes) -> Reply:
        answer = super().do_rpush(key, *values)
        if key.startswith(QUEUE):
            something_queued(key.rpartition(b":")[2].decode())
        return answer

    def do_hdel(self, key: bytes, *names: bytes) -> Reply:
        if key.endswith(b".msgs"):
            for redis_id in names:
                there = self.messages.get(redis_id)
                if there is not None and self.do_hexists(key, redis_id):
                    self._world.note("left", key.decode(), there["message_id"], redis_id.decode())
                    self._look_for_its_key(there["message_id"], redis_id)
        return super().do_hdel(key, *names)

    def do_set(self, key: bytes, value: bytes, *options: bytes) -> Reply:
        if key.startswith(_DONE):
            self._world.note("completed", key.rpartition(b":")[2].decode())
        return super().do_set(key, value, *options)

    def waiting(self) -> list[dict[str, Any]]:
        """Return every queued or fetched message."""
        there: list[dict[str, Any]] = []
        for name in (b".msgs", b".DQ.msgs"):
            there += [self.messages[redis_id] for redis_id in self.value(QUEUE + name) or ()]
        return there

    def _look_for_its_key(self, message_id: str, copy: bytes) -> None:
        if sum(each["message_id"] == message_id for each in self.waiting()) > 1:
            return
        for key in list(self._values):
            if key.startswith(_DEDUP) and (self.value(key) or {}).get(b"id") == message_id.encode():
                self._world.note("key outlives", key.decode(), message_id)

    def _enqueued(self, key: bytes, redis_id: bytes, body: dict[str, Any]) -> None:
        what = "dead letter" if key.endswith(b".XQ.msgs") else "queued"
        self._world.note(
            what, key.decode(), body["message_id"], redis_id.decode(), body["actor_name"], repr(body["args"])
        )

    def _token(self, key: bytes) -> bytes | None:
        value = self.value(key)
        if isinstance(value, dict):
            # Message that holds the key, and its running delivery.
            token: bytes = value.get(b"id", b"") + b"/" + value.get(b"run", b"")
            return token
        return value if isinstance(value, bytes) else None

    def _changed(self, key: bytes, before: bytes | None, after: bytes | None) -> None:
        task = self._world.current
        self._world.note("key", key.decode(), before, after)
        if after is not None and task is not None:
            self._owners.setdefault(key + after, Owner(task.process, task.message_id, task.since))
        if before is not None and not self._may(key, before):
            self._note_theft(key, before, after)

    def _prolonged(self, key: bytes, token: bytes) -> None:
        if not self._may(key, token, prolonged=True):
            self._note_theft(key, token, b"the same, for longer")

    def _note_theft(self, key: bytes, before: bytes, after: bytes | None) -> None:
        self._world.note("taken from another", key.decode(), before, after, self._owners[key + before].process.name)

    def _may(self, key: bytes, token: bytes, prolonged: bool = False) -> bool:
        """Return whether the running task was allowed to change the key of this token."""
        owner, task = self._owners.get(key + token), self._world.current
        if owner is None or task is None:
            return True
        if key.startswith(_LEASE):
            # Also for dead holders until the ttl ends: only another run of a sweep knows that its holder is gone.
            same = owner.message_id == task.message_id
            mine = same and owner.process is task.process
            return mine or (not prolonged and key in _SWEEP_LEASES and (same or self._is_gone(token)))
        if not owner.process.alive or owner.process is task.process:
            return True
        if key.startswith(_DEDUP):
            message_id, _, run = token.partition(b"/")
            same = task.message_id is None or task.message_id.encode() == message_id
            # A message moves from its sender to the process that runs it. A run belongs to one process. But a process
            # that was paused after it fetched the message may be one of two that run it (I2).
            stopped = owner.process.paused_until >= owner.since or task.process.paused_until >= task.since
            return same and (not run or stopped)
        return False

    def _is_gone(self, token: bytes) -> bool:
        """Return whether the ledger says that its run ended or had no heartbeat for a minute."""
        committed = self._world.shared["postgres"].committed
        epochs = [row["epoch"] for row in committed.get("leases", {}).values() if row["holder"] == token.decode()]
        runs = [run for run in committed.get("runs", {}).values() if run["epoch"] in epochs]
        silent_since = datetime.fromtimestamp(self._world.now, UTC) - SILENCE
        return bool(epochs) and all(run["outcome"] is not None or run["heartbeat_at"] < silent_since for run in runs)
