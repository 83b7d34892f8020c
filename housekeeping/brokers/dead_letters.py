"""Dead letters: messages that the broker has given up, to be listed, requeued and deleted.

::

    store = dead_letters_of(broker)
    for letter in store.newest_first():
        print(letter.id, letter.queue, letter.error)

Dramatiq keeps those of Redis in a sorted set by time and a hash of bodies per queue. RabbitMQ keeps them in a
dead-letter queue beside each queue. Texts for people have their secrets masked. `dead_letter_selection` searches the
letters and changes many at once.
"""

from __future__ import annotations

import dataclasses
import hashlib
import heapq
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property, partial
from typing import Any, Final, Literal, Protocol
from uuid import uuid4

from dramatiq import Broker, Message
from dramatiq.brokers.redis import RedisBroker
from dramatiq.common import current_millis, xq_name
from dramatiq.errors import ConnectionClosed, DecodeError
from dramatiq.middleware import MiddlewareError

from housekeeping.brokers.dramatiq_internals import SkipEnqueue, StoreUnavailable
from housekeeping.brokers.redis import time_of, wrong_type
from housekeeping.core.errors import (
    BrokerUnavailable,
    DeadLetterRefused,
    HousekeepingError,
    RedisUnavailable,
    Refused,
)
from housekeeping.core.logs import error_line, in_one_line, is_secret, mask_secrets
from housekeeping.core.redis import read_scripts, retry_on_outage, text, translate_redis_errors
from housekeeping.database.errors import error_in

#: Message options of the past attempts. A `tick` stays, because the requeued message is another attempt at that tick.
#: An `idempotency_key` and callbacks stay, because the message is the same.
_PAST_ATTEMPTS: Final = frozenset(
    {"retries", "traceback", "requeue_timestamp", "redis_message_id", "eta", "claim", "scheduled_at", "duplicate_of"}
)
#: Beginning of the message options of deduplication.
OF_DEDUPLICATION: Final = "deduplication_"
#: The message option that distinguishes the attempts of a requeued dead letter from those before.
LIFE: Final = OF_DEDUPLICATION + "life"
#: Errors of one message, and not of a server. Its sender, or an older release, chose what it contains.
_BROKEN: Final = (DeadLetterRefused, ValueError, TypeError, KeyError, AttributeError)
NAME_WIDTH: Final = 60  # characters of an id, a name or the arguments in a list
_ERROR_WIDTH: Final = 200
_UNDECLARED: Final = (
    "the worker process that took it does not declare this actor: restart it with the sender's code and settings, then "
    "requeue"
)


@dataclass(frozen=True)
class DeadLetter:
    """A message that the broker has given up; it is decoded when its content is first asked for.

    Attributes:
      broker_id: The broker's id.
      queue: The queue of the message.
      died_ms: When the broker gave it up, in milliseconds since 1970; 0 if unknown.
      body: The encoded message.
      tag: RabbitMQ's number of the delivery that has read it.
    """

    broker_id: str
    queue: str
    died_ms: float
    body: bytes
    tag: int = 0

    @cached_property
    def died_at(self) -> datetime | None:
        """Return when the broker gave it up; None if unknown."""
        return time_of(self.died_ms)

    @property
    def sent_at(self) -> datetime | None:
        """Return when the message was sent last; None if unknown."""
        return time_of(self.message.message_timestamp if self.message else 0)

    @cached_property
    def _decoded(self) -> tuple[Message[Any] | None, str]:
        try:
            message: Message[Any] = Message.decode(self.body)
        except (DecodeError, RecursionError) as error:
            return None, error_line(error.__cause__ or error)
        wrong = wrong_type(message, self.body)
        return (None, wrong) if wrong else (message, "")

    @property
    def message(self) -> Message[Any] | None:
        """Return the decoded message; None if the body cannot be decoded."""
        return self._decoded[0]

    @property
    def unreadable(self) -> str:
        """Return why the body cannot be decoded; an empty text if it can."""
        return self._decoded[1]

    @property
    def id(self) -> str:
        """Return the message id, or the broker's id for an unreadable message."""
        return self.message.message_id if self.message else self.broker_id

    @property
    def retries(self) -> int:
        """Return the number of retries."""
        retries = self.message.options.get("retries", 0) if self.message else 0
        return retries if isinstance(retries, int) else 0

    @property
    def traceback(self) -> str | None:
        """Return the traceback of the last error, if known."""
        traceback = self.message.options.get("traceback") if self.message else None
        return traceback if isinstance(traceback, str) else None

    @property
    def error(self) -> str | None:
        """Return the error of the innermost cause; without a traceback, why the message cannot be read, or None."""
        found = error_in(self.traceback or "") or self.unreadable or None
        return f"{found}; {_UNDECLARED}" if found and found.startswith("dramatiq.errors.ActorNotFound: ") else found

    def as_json(self) -> dict[str, Any]:
        """Return the letter as lists show it, with secrets masked."""
        message = self.message
        return {
            "message_id": None if message is None else message.message_id,
            "broker_id": self.broker_id,
            "actor": None if message is None else message.actor_name,
            "queue": self.queue,
            "died_at": self.died_at,
            "retries": self.retries,
            "arguments": in_one_line(arguments(self), NAME_WIDTH),
            "error": in_one_line(bounded(self.error) or "", _ERROR_WIDTH) or None,
            "unreadable": self.unreadable or None,
        }

    def revived(self, broker: Broker) -> Message[Any]:
        """Return the message for a new start in its actor's queue.

        Raises:
          DeadLetterRefused: When the message cannot be read.
        """
        if self.message is None:
            raise DeadLetterRefused(f"{self.broker_id!r} cannot be sent again, because it cannot be read")
        actor = broker.actors.get(self.message.actor_name)
        kept = {name: value for name, value in self.message.options.items() if name not in _PAST_ATTEMPTS}
        return as_new(
            dataclasses.replace(
                self.message,
                queue_name=actor.queue_name if actor else self.queue,
                options=kept,
                message_timestamp=current_millis(),  # otherwise a message with `max_age` would be dropped at once
            )
        )


def as_new(message: Message[Any]) -> Message[Any]:
    """Return a dead letter's message without what deduplication noted in it, so that it claims its key again.

    With that, it would count as the holder of the key, and its next attempt as a waiting retry.
    """
    options = {name: value for name, value in message.options.items() if not name.startswith(OF_DEDUPLICATION)}
    return dataclasses.replace(message, options={**options, LIFE: uuid4().hex})


@dataclass(frozen=True, slots=True)
class LetterResult:
    """Result of requeueing or deleting a dead letter.

    Attributes:
      outcome: ``requeued``: it is in its queue. ``deleted``: it is gone for good. ``duplicate`` or ``refused``: it
        stays a dead letter. ``gone``: it was already requeued or deleted.
      detail: For a duplicate, the id of the message that holds its key, if known. If refused, the reason.
    """

    id: str
    outcome: Literal["requeued", "deleted", "duplicate", "refused", "gone"]
    detail: str | None = None


LetterAction = Literal["requeue", "delete"]


class DeadLetterStore(Protocol):
    """The dead letters of one broker."""

    def counts(self) -> dict[str, int]:
        """Return the number of dead letters by queue; queues without any are left out."""

    def newest_first(self, queue: str | None = None, died_until: datetime | None = None) -> Iterator[DeadLetter]:
        """Yield the dead letters of one queue or of all, newest first; with a time, only those that died by then."""

    def change_each(self, action: LetterAction, letters: Sequence[DeadLetter]) -> Iterator[LetterResult]:
        """Requeue dead letters through the middleware's hooks, or delete them for good; each by itself and atomically.

        One that cannot be sent is refused, and the others are requeued.
        """


def _requeue(
    broker: Broker, letter: DeadLetter, move: Callable[[Message[Any]], object], **options: str
) -> LetterResult:
    """Requeue a letter through the hooks of the middleware. Refuse it if its message is broken.

    Parameters:
      move: Moves the message from the dead letters to its queue, at once; returns a false value if it is there no more.
      options: Further options of the message.

    Raises:
      RedisUnavailable: When a hook needs Redis, which does not answer.
    """
    try:
        message = letter.revived(broker).copy(options=options)
        broker.emit_before("enqueue", message, None)
        if not move(message):
            return LetterResult(letter.id, "gone")
        broker.emit_after("enqueue", message, None)
        return LetterResult(letter.id, "requeued")
    except SkipEnqueue as skip:
        return LetterResult(letter.id, "duplicate", skip.duplicate_of)
    except StoreUnavailable as error:
        raise RedisUnavailable(str(error)) from error
    except (MiddlewareError, *_BROKEN) as error:
        return LetterResult(letter.id, "refused", error_line(error))


#: Characters of a text that are searched for secrets. The search takes time, and longer texts are not readable.
LONGEST: Final = 20_000
_DEEPEST: Final = 50  # levels of nested lists and dictionaries that are shown


def without_secrets(value: Any, name: str = "", depth: int = 0) -> Any:
    """Return a value with secrets masked: in texts, in JSON within texts, and under names such as ``password``."""
    if depth > _DEEPEST:
        return "…"
    if value is not None and name and is_secret(name):
        return "***"
    if isinstance(value, dict):
        named = {str(key)[:LONGEST]: each for key, each in value.items()}
        return {mask_secrets(key): without_secrets(each, key, depth + 1) for key, each in named.items()}
    if isinstance(value, list | tuple):
        # Headers may be pairs of a name and a value.
        name = value[0][:LONGEST] if len(value) == 2 and isinstance(value[0], str) else ""
        return [without_secrets(each, name if number else "", depth + 1) for number, each in enumerate(value)]
    return _text_without_secrets(value, depth) if isinstance(value, str) else value


def _text_without_secrets(text: str, depth: int) -> str | None:
    if len(text) <= LONGEST and text.lstrip()[:1] in ("{", "[", '"'):
        try:
            carried = json.loads(text)
        except (ValueError, RecursionError):
            return bounded(text)
        shown = without_secrets(carried, depth=depth + 1)
        if shown != carried:
            return json.dumps(shown, ensure_ascii=False)
    return bounded(text)


def arguments(letter: DeadLetter) -> str:
    """Return the arguments of the call as Python would write them; empty for an unreadable message."""
    if letter.message is None:
        return ""
    given = [repr(without_secrets(each)) for each in letter.message.args]
    named = without_secrets(letter.message.kwargs)
    return ", ".join([*given, *(f"{name}={value!r}" for name, value in named.items())])


def body(letter: DeadLetter) -> dict[str, Any]:
    """Return the arguments and options, or the bytes of an unreadable message; None for what it does not have."""
    if letter.message is None:
        unknown = dict.fromkeys(("args", "kwargs", "options", "traceback"))
        return {**unknown, "body": bounded(letter.body.decode("utf-8", "backslashreplace"))}
    options = {name: value for name, value in letter.message.options.items() if name != "traceback"}
    return {
        "args": without_secrets(list(letter.message.args)),
        "kwargs": without_secrets(letter.message.kwargs),
        "options": without_secrets(options),
        "traceback": bounded(letter.traceback),
        "body": None,
    }


def bounded(text: str | None) -> str | None:
    """Return a text with secrets masked; of a very long one the beginning."""
    if text is None or len(text) <= LONGEST:
        return None if text is None else mask_secrets(text)
    # The end is cut off as well, because half a secret would not be recognized.
    return f"{mask_secrets(text[:LONGEST])[: LONGEST // 2]}… ({len(text):,} characters)"


_SUFFIX: Final = ".XQ"
_PAGE: Final = 100  # dead letters per round trip
_LOCK_S: Final = 30  # how long a requeue blocks others if its process dies

#: The scripts of the file beside this module, by name.
_LUA: Final = read_scripts(__file__)
_MOVE: Final = _LUA["move"]


class RedisDeadLetters:
    """The dead letters of a Redis broker, the ready-made one or an application's own.

    Every method raises `RedisUnavailable` when Redis does not answer.
    """

    def __init__(self, broker: RedisBroker) -> None:
        self._broker = broker
        self._client: Any = broker.client
        self._move: Any = broker.client.register_script(_MOVE)

    def counts(self) -> dict[str, int]:
        with translate_redis_errors():
            numbers = {queue: self._client.zcard(self._key(queue)) for queue in self._queues()}
        return {queue: number for queue, number in numbers.items() if number}

    def newest_first(self, queue: str | None = None, died_until: datetime | None = None) -> Iterator[DeadLetter]:
        with translate_redis_errors():
            queues = self._queues() if queue is None else [queue]
            letters = (self._newest_first(name, died_until) for name in queues)
            yield from heapq.merge(*letters, key=lambda each: each.died_ms, reverse=True)

    def change_each(self, action: LetterAction, letters: Sequence[DeadLetter]) -> Iterator[LetterResult]:
        change = self._requeue if action == "requeue" else self._delete
        for letter in letters:
            with self._exclusively():
                result = change(letter)
            yield result

    @contextmanager
    def _exclusively(self) -> Iterator[None]:
        """Lock the block. Two at once for the same dead letter would leave a deduplication key held."""
        lock = self._client.lock(f"{self._broker.namespace}:__requeue__", timeout=_LOCK_S, blocking_timeout=_LOCK_S)
        with translate_redis_errors():
            if not lock.acquire():
                raise HousekeepingError("another process is requeueing dead letters; try again")
            try:
                yield
            finally:
                if lock.owned():
                    lock.release()

    def _requeue(self, letter: DeadLetter) -> LetterResult:
        dead, redis_id = self._key(letter.queue), str(uuid4())
        if self._client.zscore(dead, letter.broker_id) is None:
            return LetterResult(letter.id, "gone")

        def move(message: Message[Any]) -> object:
            queue = f"{self._broker.namespace}:{message.queue_name}"
            arguments = [letter.broker_id, redis_id, message.encode()]
            return retry_on_outage(
                lambda: self._move(keys=[dead, f"{dead}.msgs", queue, f"{queue}.msgs"], args=arguments)
            )

        return _requeue(self._broker, letter, move, redis_message_id=redis_id)

    def _delete(self, letter: DeadLetter) -> LetterResult:
        dead = self._key(letter.queue)
        with self._client.pipeline() as pipeline:
            pipeline.zrem(dead, letter.broker_id).hdel(f"{dead}.msgs", letter.broker_id)
            return LetterResult(letter.id, "deleted" if any(pipeline.execute()) else "gone")

    def _queues(self) -> list[str]:
        """Return every queue with dead letters, also those of unknown actors."""
        keys = self._client.scan_iter(match=self._key("*"), count=1000, _type="zset")
        start = len(self._key("")) - len(_SUFFIX)
        return sorted({text(key)[start : -len(_SUFFIX)] for key in keys})

    def _newest_first(self, queue: str, died_until: datetime | None = None) -> Iterator[DeadLetter]:
        """Yield the queue's dead letters, newest first, fetched page by page."""
        key = self._key(queue)
        until: Any = "+inf" if died_until is None else round(died_until.timestamp() * 1000)
        same: set[Any] = set()  # the ids that were yielded with the time `until`
        # By time and not by rank, because letters come and go meanwhile.
        while page := self._client.zrevrangebyscore(key, until, "-inf", 0, _PAGE + len(same), withscores=True):
            page = [(redis_id, ms) for redis_id, ms in page if redis_id not in same]
            if not page:
                return
            yield from self._stored(queue, page)
            last = page[-1][1]
            same = (same if last == until else set()) | {redis_id for redis_id, ms in page if ms == last}
            until = last

    def _stored(self, queue: str, found: Sequence[tuple[Any, float]]) -> Iterator[DeadLetter]:
        bodies = self._client.hmget(f"{self._key(queue)}.msgs", [redis_id for redis_id, _ in found])
        for (redis_id, died_ms), body in zip(found, bodies, strict=True):
            if body is not None:  # otherwise it was requeued or purged meanwhile
                yield DeadLetter(text(redis_id), queue, died_ms, body)

    def _key(self, queue: str) -> str:
        return f"{self._broker.namespace}:{queue}{_SUFFIX}"


#: The largest number in AMQP.
_MAX_PREFETCH: Final = 65_535
#: Seconds without a letter after which a consumer is not sent more.
_PAUSE_S: Final = 1.0


class RabbitmqDeadLetters:
    """Dead letters of the queues that a `ReliableRabbitmqBroker` has declared.

    RabbitMQ delivers a queue only from its head, so every read fetches all dead letters. They return to their places
    when the channel is closed or the process ends. Meanwhile another reader finds none.

    Every method raises `BrokerUnavailable` when RabbitMQ does not answer.
    """

    def __init__(self, broker: Any) -> None:
        self._broker = broker

    def counts(self) -> dict[str, int]:
        with self._channel():
            numbers = {queue: self._count(queue) for queue in self._queues()}
        return {queue: number for queue, number in numbers.items() if number}

    def newest_first(self, queue: str | None = None, died_until: datetime | None = None) -> Iterator[DeadLetter]:
        with self._channel() as channel:
            queues = [each for each in self._queues() if queue in (None, each)]
            found = [letter for each in queues for letter in self._read(channel, each)]
        if died_until is not None:
            found = [letter for letter in found if letter.died_ms <= died_until.timestamp() * 1000]
        # Times have seconds only, so of equal ones the last in its queue is the newest.
        yield from sorted(reversed(found), key=lambda letter: letter.died_ms, reverse=True)

    def change_each(self, action: LetterAction, letters: Sequence[DeadLetter]) -> Iterator[LetterResult]:
        for queue in dict.fromkeys(letter.queue for letter in letters):
            wanted = {letter.broker_id: letter for letter in letters if letter.queue == queue}
            with self._channel() as channel:
                channel.tx_select()  # each is changed in a transaction of its own
                self._broker._declare_xq_queue(queue)  # the queue may have been deleted
                for fetched in self._fetched(channel, queue):
                    if letter := wanted.pop(fetched.broker_id, None):
                        move = partial(self._move, channel, fetched.tag)
                        if action == "requeue":
                            yield _requeue(self._broker, letter, move)
                        else:
                            channel.basic_ack(fetched.tag)
                            channel.tx_commit()
                            yield LetterResult(letter.id, "deleted")
                    if not wanted:
                        break
            yield from (LetterResult(letter.id, "gone") for letter in wanted.values())

    def _move(self, channel: Any, tag: int, message: Message[Any]) -> bool:
        # Declare the queue again: RabbitMQ silently drops messages to a deleted queue.
        self._broker.queues_pending.add(message.queue_name)
        self._broker.declare_queue(message.queue_name, ensure=True)
        properties = self._broker.properties_of(message)
        # One transaction publishes it to the queue and removes it from the dead letters.
        channel.basic_publish("", self._broker.physical(message.queue_name), message.encode(), properties)
        channel.basic_ack(tag)
        channel.tx_commit()
        return True

    def _queues(self) -> list[str]:
        return sorted(self._broker.get_declared_queues())

    def _count(self, queue: str) -> int:
        declared: Any = self._broker._declare_xq_queue(queue)
        return int(declared.method.message_count)

    def _read(self, channel: Any, queue: str) -> list[DeadLetter]:
        """Return the dead letters of the queue, oldest first, fetched until the channel is closed."""
        found: list[DeadLetter] = []
        waiting = self._count(queue)
        # A consumer is sent many at once, and `basic_get` takes a round trip for each. A quorum queue takes an
        # unlimited prefetch for 2,000, and a server may be configured to another default.
        channel.basic_qos(prefetch_count=_MAX_PREFETCH)
        channel.basic_consume(
            self._name(queue),
            lambda _, method, properties, body: found.append(_delivered(queue, method, properties, body)),
        )
        while (before := len(found)) < waiting:
            channel.connection.process_data_events(time_limit=_PAUSE_S)
            if len(found) == before:
                break  # another reader has them, or the prefetch is used up
        found += self._fetched(channel, queue)
        channel.connection.process_data_events(time_limit=0)
        return found

    def _fetched(self, channel: Any, queue: str) -> Iterator[DeadLetter]:
        """Yield each dead letter of the queue, oldest first, fetched one by one until the channel is closed."""
        while (got := channel.basic_get(self._name(queue)))[0] is not None:
            yield _delivered(queue, *got)

    def _name(self, queue: str) -> str:
        return str(self._broker.physical(xq_name(queue)))

    @contextmanager
    def _channel(self) -> Iterator[Any]:
        from housekeeping.brokers.rabbitmq import PIKA_ERRORS  # needs an extra

        try:
            with self._broker.waiting():
                # The old connection may be lost, because an idle thread answers no heartbeats.
                channel = self._broker._retry(lambda: self._broker.connection.channel())
                try:
                    yield channel
                finally:
                    with suppress(*PIKA_ERRORS):
                        channel.close()
        except (ConnectionClosed, *PIKA_ERRORS) as error:
            del self._broker.connection
            text = error_line(error).removeprefix("RabbitMQ: ")
            raise BrokerUnavailable(f"RabbitMQ did not answer: {text}") from error


def _delivered(queue: str, method: Any, properties: Any, body: bytes) -> DeadLetter:
    # Without an id: written by Dramatiq's own broker, before it was hardened.
    broker_id = properties.message_id or hashlib.sha256(body).hexdigest()[:32]
    return DeadLetter(broker_id, queue, (properties.timestamp or 0) * 1000, body, method.delivery_tag)


def dead_letters_of(broker: Broker) -> DeadLetterStore:
    """Return the dead letters of a broker that has the library's middleware.

    Raises:
      Refused: When the dead letters of this kind of broker cannot be listed.
    """
    if isinstance(broker, RedisBroker):
        return RedisDeadLetters(broker)
    if hasattr(broker, "bury"):
        return RabbitmqDeadLetters(broker)
    raise Refused(f"the dead letters of a {type(broker).__name__} cannot be listed")
