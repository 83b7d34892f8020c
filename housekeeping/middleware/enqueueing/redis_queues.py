"""Queues of a Redis broker. One script writes a message and its key, so that no crash separates them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, Final

import redis
from dramatiq import Message
from dramatiq.brokers.redis import RedisBroker
from redis.connection import ConnectionPool
from redis.sentinel import SentinelConnectionPool

from housekeeping.core.errors import RedisUnavailable
from housekeeping.core.middleware_errors import StoreUnavailable
from housekeeping.core.redis.client import retry_redis, text
from housekeeping.middleware.deduplication import scripts as key_scripts
from housekeeping.middleware.deduplication.keys import DeduplicationKeys, KeyStep, Kind
from housekeeping.middleware.dramatiq_internals import dispatch_arguments, dispatch_script
from housekeeping.middleware.enqueueing import scripts

#: Messages per script. Keeps what is on Lua's stack at a time, two values for each, far below its limit of 8000.
AT_ONCE: Final = 1000

#: Messages that one script enqueues, and the steps of their keys.
_Command = list[tuple[Message[Any], KeyStep | None]]


class RedisQueues:
    """The queues of a Redis broker, filled by a script that contains the broker's own.

    Parameters:
      keys: The deduplication keys if they are in the same Redis, else None.
    """

    def __init__(self, broker: RedisBroker, keys: DeduplicationKeys | None) -> None:
        self._broker = broker
        self._prefix = keys.prefix if keys else ""
        self.has_keys = keys is not None
        self._dispatch = dispatch_script(broker)
        steps: dict[Kind, str] = {
            "claim": key_scripts.CLAIM,
            "retain": key_scripts.RETAIN,
            "release": key_scripts.RELEASE,
        }
        lua = text(self._dispatch.script)
        self._scripts: dict[Kind, Any] = {
            kind: broker.client.register_script(scripts.PACKED + scripts.with_enqueueing(step, lua))
            for kind, step in steps.items()
        }
        self._many: Any = broker.client.register_script(scripts.with_enqueueing_many(lua))
        self._many_without_keys: Any = broker.client.register_script(scripts.MANY_WITHOUT_KEYS % {"dispatch": lua})

    def put(self, messages: Sequence[Message[Any]], steps: Sequence[KeyStep | None]) -> list[str]:
        """Enqueue messages and claim their keys, all or none.

        Returns:
          For each message the id of the holder of its key if that prevented the enqueue, else an empty string. Its own
          id means that it is already in the queue.

        Raises:
          StoreUnavailable: When Redis does not answer and new messages have keys. They may be enqueued nevertheless.
          redis.RedisError: The same for messages without keys, and for those that Dramatiq has had before: its retry
            loops and `reliable_enqueue` wait for this error.
        """
        # Repeating a script with a step changes nothing. Repeating Dramatiq's own would enqueue a second copy.
        tries = 2 if all(steps) else 1
        try:
            answers = retry_redis(lambda: self._execute(messages, steps), tries=tries, pause_s=0)
        except RedisUnavailable as error:
            if any(step is not None and step.fresh for step in steps):
                raise StoreUnavailable(str(error)) from error
            raise error.__cause__ or error from None
        return [text(holder) for answer in answers for holder in (answer if isinstance(answer, list) else [answer])]

    def _execute(self, messages: Sequence[Message[Any]], steps: Sequence[KeyStep | None]) -> list[Any]:
        commands = list(_commands(messages, steps))
        if len(commands) == 1:
            return [self._run(commands[0], None, maintenance=True)]
        with self._broker.client.pipeline(transaction=True) as pipeline:
            for number, command in enumerate(commands):
                # The broker looks for messages of dead workers once, not for each command.
                self._run(command, pipeline, maintenance=number == 0)
            answers: list[Any] = pipeline.execute()
        return answers

    def _run(self, command: _Command, pipeline: Any, *, maintenance: bool) -> Any:
        message, step = command[0]
        copy = (message.options["redis_message_id"], message.encode())
        dispatched = dispatch_arguments(self._broker, "enqueue", message.queue_name, *copy, maintenance=maintenance)
        if step is None:
            script = self._dispatch if len(command) == 1 else self._many_without_keys
            for each, _ in command[1:]:
                dispatched += (each.options["redis_message_id"], each.encode())
            return script(keys=[self._broker.namespace], args=dispatched, client=pipeline)
        arguments = step.arguments()
        if len(command) == 1:
            return self._scripts[step.kind](
                keys=[self._prefix + step.key, self._broker.namespace],
                args=scripts.packed([int(step.once), len(arguments), *arguments, *dispatched]),
                client=pipeline,
            )
        keys, shared = [self._broker.namespace], arguments[1:]
        args = [int(step.once), len(shared), *shared, *dispatched[:-2]]
        for each, its_step in command:
            assert its_step is not None
            keys.append(self._prefix + its_step.key)
            args += (its_step.message_id, each.encode())
        return self._many(keys=keys, args=args, client=pipeline)


def _commands(messages: Sequence[Message[Any]], steps: Sequence[KeyStep | None]) -> Iterator[_Command]:
    """Yield groups of messages, in order, that one script can enqueue.

    They have no keys, or claims that differ only in key and message id.
    """

    def group(each: tuple[Message[Any], KeyStep | None]) -> object:
        message, step = each
        return (message.queue_name, step and (step.shared_arguments() or message.message_id))

    for _, some in itertools.groupby(zip(messages, steps, strict=True), group):
        while command := list(itertools.islice(some, AT_ONCE)):
            yield command


def share_redis(queues: redis.Redis, keys: redis.Redis) -> bool:
    """Return whether two clients are known to use the same database of the same server."""
    return queues is keys or (_address(queues) is not None and _address(queues) == _address(keys))


def _address(client: redis.Redis) -> tuple[object, ...] | None:
    """Return the address and database of a client, or its Sentinels and service; None if it has neither."""
    pool: Any = client.connection_pool
    if not isinstance(pool, ConnectionPool):
        return None
    given = pool.connection_kwargs
    if isinstance(pool, SentinelConnectionPool):
        clients = [each.connection_pool.connection_kwargs for each in pool.sentinel_manager.sentinels]
        sentinels = frozenset((each.get("host"), each.get("port")) for each in clients)
        return (sentinels, pool.service_name, given.get("db") or 0) if pool.is_master else None
    if given.get("path"):
        return (given["path"], given.get("db") or 0)
    return (given.get("host") or "localhost", given.get("port") or 6379, given.get("db") or 0)
