"""Enqueueing: the only path by which messages reach their queues, alone or in bulk.

`EnqueuePath` runs the hooks before, writes the message and its deduplication key, and runs the hooks after. If both are
in the same Redis, one Lua script writes them, so that no crash separates them; Dramatiq's own script is within it.
`enqueue_many` sends many messages of an actor in a few round trips for each thousand.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from typing import Any, Final, TypeVar

import redis
from dramatiq import Actor, Broker, Message, Middleware
from dramatiq.brokers.redis import RedisBroker
from dramatiq.common import current_millis, dq_name
from redis.connection import ConnectionPool
from redis.sentinel import SentinelConnectionPool

from housekeeping.brokers.dramatiq_internals import (
    SkipEnqueue,
    StoreUnavailable,
    dispatch_arguments,
    encode,
    enqueues_by_dispatch,
    fail_message_on_error,
)
from housekeeping.brokers.redis import ReliableRedisBroker, dispatch_source
from housekeeping.core import telemetry
from housekeeping.core.errors import RedisUnavailable
from housekeeping.core.logs import error_line
from housekeeping.core.logs import logger as named_logger
from housekeeping.core.redis import GIVEN, fill, named, read_scripts, register_freeing_script, retry_on_outage, text
from housekeeping.middleware import keys as key_scripts
from housekeeping.middleware.consistency import DataConsistency
from housekeeping.middleware.deduplication import Deduplication, copy_id, duplicate_of
from housekeeping.middleware.delivery import Admission
from housekeeping.middleware.keys import DeduplicationKeys, KeyChange, KeyStep, schedule_of
from housekeeping.middleware.observe import sending
from housekeeping.middleware.retries import Retries, note_duplicates
from housekeeping.middleware.schedule import Schedule

logger = named_logger(__name__)

M = TypeVar("M", bound=Middleware)
R = TypeVar("R")

#: The scripts of the file beside this module, by name.
_LUA: Final = read_scripts(__file__)
WITH_ENQUEUEING: Final = _LUA["one"]
_TAKE: Final = _LUA["take"]


def with_enqueueing(step: str, dispatch: str) -> str:
    """Return one script that changes a key and enqueues a message by the broker's own script."""
    return GIVEN + fill(_LUA["enqueue"], take=_TAKE, dispatch=dispatch) + fill(WITH_ENQUEUEING, step=step)


def with_enqueueing_many(dispatch: str) -> str:
    """Return the script that enqueues many messages, with keys or without; it runs `one` for each held key."""
    one = fill(WITH_ENQUEUEING, step=key_scripts.CLAIM)
    return GIVEN + fill(_LUA["many"], take=_TAKE, one=one, dispatch=dispatch)


#: Messages per script. Limits the memory used, and how long other clients of Redis wait (about 10 ms). Two values for
#: each are on Lua's stack, whose limit is 8000.
BATCH_SIZE: Final = 1000


class RedisQueues:
    """The queues of a Redis broker, filled by a script that contains the broker's own.

    Parameters:
      keys: The deduplication keys if they are in the same Redis, else None.
    """

    def __init__(self, broker: RedisBroker, keys: DeduplicationKeys | None) -> None:
        self._broker = broker
        self._prefix = keys.prefix if keys else ""
        self.has_keys = keys is not None
        steps: dict[KeyChange, str] = {
            "claim": key_scripts.CLAIM,
            "retain": key_scripts.RETAIN,
            "release": key_scripts.RELEASE,
        }
        lua = dispatch_source(broker)
        sources: dict[KeyChange | None, str] = {kind: with_enqueueing(step, lua) for kind, step in steps.items()}
        sources[None] = lua
        freeing = functools.partial(register_freeing_script, broker.client)
        registered: dict[bool, Any] = {False: broker.client.register_script, True: freeing}
        #: By kind of the step, and by whether the message replaces another.
        self._scripts: dict[tuple[KeyChange | None, bool], Any] = {
            (kind, replacing): script(source)
            for kind, source in sources.items()
            for replacing, script in registered.items()
        }
        self._many: Any = broker.client.register_script(with_enqueueing_many(lua))

    def put(
        self, messages: Sequence[Message[Any]], steps: Sequence[KeyStep | None], replacing: bool = False
    ) -> list[str]:
        """Enqueue messages and claim their keys, all or none; one by one if another middleware has changed some.

        Parameters:
          replacing: Whether they replace messages that end now. A full Redis takes them, because it frees memory then.

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
            return retry_on_outage(lambda: self._execute(messages, steps, replacing), tries=tries, pause_s=0)
        except RedisUnavailable as error:
            if any(step is not None and step.fresh for step in steps):
                raise StoreUnavailable(str(error)) from error
            raise error.__cause__ or error from None

    def _execute(self, messages: Sequence[Message[Any]], steps: Sequence[KeyStep | None], replacing: bool) -> list[str]:
        if len(messages) > 1 and not _are_alike(messages, steps):
            # Another middleware has changed some of them, such as their queue.
            return [
                answer
                for message, step in zip(messages, steps, strict=True)
                for answer in self._execute([message], [step], replacing)
            ]
        message, step = messages[0], steps[0]
        namespace = self._broker.namespace
        dispatched = dispatch_arguments(self._broker, "enqueue", message.queue_name)
        if step is None and len(messages) == 1:
            args = [*dispatched, message.options["redis_message_id"], encode(message)]
            self._scripts[None, replacing](keys=[namespace], args=args)
            return [""]
        command, _, *constant = dispatched
        given = _given(command, *constant, step=step and (step.once, *step.shared.items()))
        if step is not None and len(messages) == 1:
            args = [given, encode(message), message.options["redis_message_id"], message.message_id]
            script = self._scripts[step.kind, replacing]
            return [text(script(keys=[self._prefix + step.key, namespace], args=args))]
        names = [self._prefix + its_step.key for its_step in steps if its_step is not None]
        ids = named(ids=[each.message_id for each in messages])
        prevented = self._many(keys=[namespace, *names], args=[given, *map(encode, messages), ids])
        holders = [""] * len(messages)
        for number, holder in zip(prevented[::2], prevented[1::2], strict=True):
            holders[number - 1] = text(holder)
        return holders


@functools.lru_cache(maxsize=256)
def _given(command: str, *constant: object, step: tuple[Any, ...] | None) -> str:
    """Return what the scripts get by name: Dramatiq's arguments without the time and the message, and the key's."""
    its: dict[str, Any] = {} if step is None else {"once": step[0], "step": dict(step[1:])}
    return named(dispatch=[command, "", *map(str, constant)], **its)


def _are_alike(messages: Sequence[Message[Any]], steps: Sequence[KeyStep | None]) -> bool:
    """Return whether one script can enqueue these messages: in the same queue, with equal claims or none."""
    queue, first = messages[0].queue_name, steps[0]
    if any(message.queue_name != queue for message in messages):
        return False
    if first is None:
        return not any(steps)
    claim = ("claim", first.once, first.shared)
    return all(step is not None and (step.kind, step.once, step.shared) == claim for step in steps)


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


#: A message that was enqueued, or the reason why it was not.
Sent = Message[Any] | SkipEnqueue


def replace_enqueue(broker: Broker) -> None:
    """Replace the broker's ``enqueue`` by `EnqueuePath`; called once, after all middleware is added."""
    broker.enqueue = EnqueuePath(broker)  # type: ignore[method-assign]


class EnqueuePath:
    """Replacement for a broker's ``enqueue`` that writes message and key together, and marks dropped messages.

    All messages pass here: from ``send``, `enqueue_many`, groups, pipelines, periodiq and retries, and delayed ones
    that are due. A dropped message raises no error; it is returned with ``options["duplicate_of"]``.

    First the ``before_enqueue`` hooks may drop messages, and choose the changes of keys. Then messages and keys are
    written. If they share a Redis, one script writes both; else the keys are reserved first and confirmed afterward.
    Last, the ``after_enqueue`` hooks see the enqueued messages.

    A broker with its own ``enqueue`` keeps it and runs the hooks itself. `Deduplication` then reserves each key in
    ``before_enqueue`` and confirms it in ``after_enqueue``.
    """

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._brokers_own = broker.enqueue
        self._deduplication = _find(broker, Deduplication)
        self._consistency = _find(broker, DataConsistency)
        self._retries = _find(broker, Retries)
        self._schedule = _find(broker, Schedule)
        self._redis: RedisQueues | None = None
        if isinstance(broker, RedisBroker) and enqueues_by_dispatch(broker):
            keys = self._deduplication.keys
            shared = share_redis(broker.client, keys.client)
            self._redis = RedisQueues(broker, keys if shared else None)
            if shared:
                keys.share_redis_with_queues(broker.namespace)
                if isinstance(broker, ReliableRedisBroker):
                    _find(broker, Admission).end_with_acknowledgment(broker)

    def __call__(self, message: Message[Any], *, delay: int | None = None) -> Message[Any]:
        """Enqueue one message, as the broker's ``enqueue`` does; `delay` is in milliseconds.

        A tick that cannot be enqueued is logged, not raised, because periodiq would end. Its claim expires, so the
        next minute sends it.
        """
        # One below 0, from a time in the past, would be taken off the time that the key is held.
        delay = None if delay is None else max(delay, 0)
        try:
            claimed = self._schedule.claim(self._broker, message)
            sent = self._enqueue(claimed, delay)
        except SkipEnqueue as skip:  # the tick was sent before
            return self._returned_to_sender([(message, skip)])[0]
        except Exception as error:
            if schedule_of(self._broker, message) is None:
                raise
            self._schedule.unsent()
            logger.error(
                "Tick could not be sent; retrying in a minute", worker=message.actor_name, error=error_line(error)
            )
            return message
        if isinstance(sent, SkipEnqueue):
            self._note_skip(message, claimed, sent)
            return self._returned_to_sender([(message, sent)])[0]
        if claimed is not message:
            self._schedule.sent(claimed)
        return sent

    def send_many(self, messages: Sequence[Message[Any]]) -> list[Message[Any]]:
        """Enqueue new messages of one actor at once; returns one message for each."""
        if self._redis is None and _put_many(self._broker) is None:
            return [self._broker.enqueue(message) for message in messages]
        options = dict(messages[0].options)  # as they were given: hooks leave marks in the messages
        if self._redis is not None:
            for message in messages:
                # The first copy in Redis may have the message's id. Copies for retries get other ids.
                message.options["redis_message_id"] = message.message_id
        with sending(*messages):
            sent = self._pass(messages, None)
        dropped = {
            number: (dataclasses.replace(message, options=dict(options)), skip)
            for number, (message, skip) in enumerate(zip(messages, sent, strict=True))
            if isinstance(skip, SkipEnqueue)
        }
        returned = dict(zip(dropped, self._returned_to_sender([*dropped.values()]), strict=True))
        return [each if isinstance(each, Message) else returned[number] for number, each in enumerate(sent)]

    def _enqueue(self, message: Message[Any], delay: int | None) -> Sent:
        if self._redis is not None and self._redis.has_keys:
            # As `RedisBroker.enqueue` does: each copy has an id of its own, because a message may be enqueued again.
            replacing = self._deduplication.is_replacing(message)
            queue, options = message.queue_name, {**message.options, "redis_message_id": os.urandom(16).hex()}
            if delay is not None:
                queue, options["eta"] = dq_name(queue), current_millis() + delay
            its = (message.actor_name, message.args, message.kwargs, options)
            copied: Message[Any] = Message(queue, *its, message.message_id, message.message_timestamp)
            with sending(copied):
                return self._pass([copied], delay, replacing)[0]
        # A copy: the marks that the hooks leave must not stay in the message if this attempt fails.
        copied = message.copy()
        with sending(copied):
            try:
                with self._deduplication.reserving():
                    return self._brokers_own(copied, delay=delay)
            except SkipEnqueue as skip:
                return skip

    def _pass(self, messages: Sequence[Message[Any]], delay: int | None, replacing: bool = False) -> list[Sent]:
        """Run the ``before_enqueue`` hooks, write messages and keys, and run the ``after_enqueue`` hooks.

        Parameters:
          replacing: See `RedisQueues.put`.
        """
        sent: list[Sent] = list(messages)
        one_position = self._consistency.sending_many() if len(messages) > 1 else nullcontext()
        with self._deduplication.collecting_steps() as steps, one_position:
            for number, message in enumerate(messages):
                try:
                    self._broker.emit_before("enqueue", message, delay)
                except SkipEnqueue as skip:
                    sent[number] = skip
        left = {number: each for number, each in enumerate(sent) if isinstance(each, Message)}
        if left:
            chosen = [steps.get(copy_id(message)) for message in left.values()]
            holders = self._write(list(left.values()), chosen, replacing)
            for number, step, holder in zip(left, chosen, holders, strict=True):
                if step is not None and (duplicate := duplicate_of(step, holder)):
                    sent[number] = duplicate
        for each in sent:
            if isinstance(each, Message):
                self._broker.emit_after("enqueue", each, delay)
        return sent

    def _write(
        self, messages: Sequence[Message[Any]], steps: Sequence[KeyStep | None], replacing: bool
    ) -> Sequence[str]:
        """Write messages and keys; return for each message the holder's id if its key is held, else an empty string."""
        if self._redis is not None and (self._redis.has_keys or not any(steps)):
            return self._redis.put(messages, steps, replacing)
        if not any(steps):
            self._put(messages)
            return [""] * len(messages)
        # What is reserved for a message that is then not enqueued expires within seconds.
        keys: DeduplicationKeys = self._deduplication.keys
        with fail_message_on_error():
            holders = keys.take_many(steps)
        free = [number for number, step in enumerate(steps) if step is None or not duplicate_of(step, holders[number])]
        if free:
            self._put([messages[number] for number in free])
            try:
                keys.confirm_many([steps[number] for number in free])
            except RedisUnavailable as error:
                logger.warning("Keys may be free before their messages have ended", error=str(error))
        return holders

    def _put(self, messages: Sequence[Message[Any]]) -> None:
        if self._redis is not None:
            self._redis.put(messages, [None] * len(messages))
        elif put_many := _put_many(self._broker):
            put_many(messages)

    def _returned_to_sender(self, dropped: Sequence[tuple[Message[Any], SkipEnqueue]]) -> list[Message[Any]]:
        """Log and count dropped messages. Return them for their sender, with the option `duplicate_of`."""
        for message, skip in dropped:
            logger.info(
                "Message not enqueued",
                job_status=skip.reason,
                worker=message.actor_name,
                message_id=message.message_id,
                duplicate_of=skip.duplicate_of,
            )
            if skip.reason == "deduplicated":
                telemetry.DEDUPLICATED.add(message.actor_name)
        note_duplicates(
            self._broker, [(message, skip.duplicate_of) for message, skip in dropped if skip.duplicate_of is not None]
        )
        return [message.copy(options={"duplicate_of": skip.duplicate_of}) for message, skip in dropped]

    def _note_skip(self, message: Message[Any], claimed: Message[Any], skip: SkipEnqueue) -> None:
        self._retries.clear_waiting_mark(self._broker, message)
        if claimed is message:
            self._schedule.tick_skipped(message, skip.reason)
        else:
            self._schedule.dropped(claimed, skip)


def _put_many(broker: Any) -> Callable[[Sequence[Message[Any]]], None] | None:
    """Return the broker's method that enqueues many messages; None if it has none, or has its own ``enqueue``."""
    owner = next((kind for kind in type(broker).__mro__ if "put_many" in vars(kind)), None)
    if owner is None or type(broker).enqueue is not vars(owner).get("enqueue"):
        return None
    put_many: Callable[[Sequence[Message[Any]]], None] = broker.put_many
    return put_many


def _find(broker: Broker, kind: type[M]) -> M:
    return next(each for each in broker.middleware if isinstance(each, kind))


def enqueue_many(actor: Actor[..., R], calls: Iterable[Any], **options: Any) -> list[Message[R]]:
    """Send one message per call, deduplicated like `send`, in a few round trips for each thousand.

    ::

        housekeeping.enqueue_many(clean_up, [1, 2, 3])
        housekeeping.enqueue_many(copy, [("a", "b"), ("c", "d")])

    As with `send`, every middleware's ``before_enqueue`` sees every message, ``after_enqueue`` sees the enqueued ones,
    and a message and its key are written together. A call that is given twice is enqueued once.

    Parameters:
      calls: A tuple or list holds the arguments of a call. Anything else is the call's only argument.
      options: Message options, as for `send_with_options`, but no delay.

    Returns:
      One message for each call, in order. A dropped message is marked with ``options["duplicate_of"]``.

    Raises:
      TypeError: When a delay is given.
      MiddlewareError: When a middleware rejects a message, or Redis does not answer. Of the thousand in question
        either all are enqueued or none. Earlier thousands are enqueued.
      redis.RedisError: The same, when the actor's messages are not deduplicated or the keys are on another Redis.
        Keys reserved there expire within seconds.
      dramatiq.errors.ConnectionClosed: The same for RabbitMQ.

    Note: On RabbitMQ, keys are reserved for a few seconds before, and confirmed after. On any other broker, or on one
    with its own `enqueue`, each message is enqueued by itself. So is each message of a broker without `install`, and of
    a thousand in which another middleware changes the queue or the actor of a message.
    """
    if "delay" in options:
        raise TypeError("enqueue_many takes no delay; send_with_options does")
    enqueue: Any = actor.broker.enqueue
    messages = (actor.message_with_options(args=_arguments(call), **options) for call in calls)
    if not isinstance(enqueue, EnqueuePath):
        return [enqueue(message) for message in messages]
    sent: list[Message[Any]] = []
    while batch := list(itertools.islice(messages, BATCH_SIZE)):
        sent += enqueue.send_many(batch)
    return sent


def _arguments(call: Any) -> tuple[Any, ...]:
    return tuple(call) if isinstance(call, tuple | list) else (call,)
