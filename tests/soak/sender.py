"""Sender of a soak's messages that writes a checkpoint after each part.

``python -m tests.soak.sender MESSAGES`` beside a worker of `tests.soak.application`.
"""

from __future__ import annotations

import itertools
import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

import dramatiq
from dramatiq import Actor, Message
from dramatiq.common import dq_name, xq_name

import housekeeping
from tests.internals.core import shared_redis
from tests.soak import application as soaked
from tests.soak.checkpoints import Checkpoint
from tests.soak.measured import Measured, keys_of, measured

CHECKPOINTS: Final = 12
ROUND: Final = 1000  # about this many messages; see `_round`
MOST_WAITING: Final = 4000  # queued messages before the sender waits for the worker
PATIENCE_S: Final = 120
SWEEP: Final = "user_status_cleanup.batch"

_numbers: Final = itertools.count()


def _new(count: int) -> list[int]:
    return list(itertools.islice(_numbers, count))


def _round(number: int) -> Iterator[Message[Any]]:
    """Send about a thousand messages. Yield each one, enqueued or dropped."""
    yield from housekeeping.enqueue_many(soaked.record, _new(498))
    yield from housekeeping.enqueue_many(soaked.keep, _new(100))
    yield from housekeeping.enqueue_many(soaked.refresh, [n % 40 for n in range(150)])
    yield from (soaked.plain.send(n) for n in range(80))
    yield from (soaked.reindex.send(n % 5) for n in range(30))
    yield from (soaked.publish.send(n % 8) for n in range(20))
    yield from (soaked.publish_in_turn.send(n) for n in range(8, 12))
    yield from (soaked.record.send_with_options(args=(n,), delay=100 + n % 300) for n in _new(20))
    yield from (soaked.remind.send_with_options(args=(n,), delay=100 + n % 300) for n in _new(20))
    yield from (soaked.stumble.send(n) for n in _new(10))
    yield from (soaked.come_back.send(n) for n in _new(20))
    yield from (soaked.give_up.send(n) for n in _new(5))
    yield soaked.tick.send()
    yield soaked.sweeps[SWEEP].send()
    # The second message with one key comes a round later, because a worker with both would delay one by seconds.
    yield soaked.charge.send_with_options(args=(number,), idempotency_key=f"soak-{number // 2}")
    for _ in range(8):
        members: list[Actor[..., Any]] = [soaked.record, soaked.keep, soaked.plain]
        yield from dramatiq.group(each.message(*_new(1)) for each in members).run().children
        second = soaked.plain.message_with_options(args=(0,), pipe_ignore=True)
        yield from (soaked.record.message(*_new(1)) | second).run().messages


def _waiting() -> int:
    """Return the number of live messages. Each stays in its queue's hash until acknowledged."""
    with soaked.broker.client.pipeline(transaction=False) as pipeline:
        for queue in soaked.broker.get_declared_queues():
            pipeline.hlen(f"{soaked.broker.namespace}:{queue}.msgs")
            pipeline.hlen(f"{soaked.broker.namespace}:{dq_name(queue)}.msgs")
        return sum(pipeline.execute())


def _came_true(holds: Callable[[], bool], patience_s: float) -> bool:
    deadline = time.monotonic() + patience_s
    while not holds():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def _until(holds: Callable[[], bool], what: str) -> None:
    if not _came_true(holds, PATIENCE_S):
        raise SystemExit(f"it did not come true in {PATIENCE_S} s: {what}")


def _short_completions_are_gone() -> bool:
    client, prefix = shared_redis.get(), f"{soaked.settings.namespace}:done:"
    short = [name for name, actor in soaked.broker.actors.items() if actor.options.get("idempotency") == soaked.SHORT]
    return not any(list(client.scan_iter(match=f"{prefix}{name}:*", count=10_000)) for name in short)


class Soak:
    """One soak, checkpoint by checkpoint."""

    def __init__(self) -> None:
        self._asked = 0
        self._enqueued: Counter[str] = Counter()
        self._rounds = itertools.count()

    def stretch(self, messages: int) -> float:
        """Send messages and wait until they end. Record the keys under load and return the seconds."""
        began = time.monotonic()
        goal = self._asked + messages
        while self._asked < goal:
            _until(lambda: _waiting() < MOST_WAITING, "the worker keeps up")
            self._count(_round(next(self._rounds)))
        sent = time.monotonic()
        self._live = _waiting()
        self._loaded = keys_of(shared_redis.get(), soaked.settings.namespace)
        counted = time.monotonic()
        _until(lambda: _waiting() == 0, "all messages end")
        return time.monotonic() - began - (counted - sent)

    def checkpoint(self, seconds: float) -> Checkpoint:
        """Return a checkpoint without live messages."""
        client, broker = shared_redis.get(), soaked.broker
        drained = keys_of(client, soaked.settings.namespace)
        soaked.measure.send()
        reply: Any = client.blpop([soaked.answers], PATIENCE_S)
        answer = json.loads(reply[1])
        _until(lambda: _waiting() == 0, "the question is answered")
        dead: Any = client.zcard(f"{broker.namespace}:{xq_name('default')}")
        ticks: Any = client.llen(f"{broker.namespace}:__dead__.{soaked.tick.actor_name}")
        clients: Any = client.client_list()
        name = client.connection_pool.connection_kwargs["client_name"]
        return Checkpoint(
            self._asked,
            dict(self._enqueued),
            answer["ended"],
            seconds,
            self._live,
            self._loaded,
            drained,
            dead,
            ticks,
            sum(each["name"] == name for each in clients),
            measured(),
            Measured(**answer["process"]),
        )

    def _count(self, messages: Iterable[Message[Any]]) -> None:
        for message in messages:
            self._asked += 1
            self._enqueued[message.actor_name] += "duplicate_of" not in message.options


def main(messages: int) -> None:
    """Write a checkpoint to stdout per twelfth of the messages, and one after short completions expired."""
    soak = Soak()
    seconds = 0.0
    for _ in range(CHECKPOINTS):
        seconds += soak.stretch(messages // CHECKPOINTS)
        sys.stdout.write(soak.checkpoint(seconds).to_line() + "\n")
        sys.stdout.flush()
    # If they do not expire, the last checkpoint shows it.
    _came_true(_short_completions_are_gone, 10 * soaked.SHORT["ttl"].total_seconds())
    sys.stdout.write(soak.checkpoint(seconds).to_line() + "\n")


if __name__ == "__main__":
    main(int(sys.argv[1]))
