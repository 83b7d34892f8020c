"""Dramatiq's RabbitMQ broker, made reliable, and its dead letters; needs pika, the extra `rabbitmq`.

Sends are confirmed, and repeated on a new connection; many messages are published in one transaction. The consumer
acknowledges no messages but its own.

Messages that are due later than in a minute are in delay queues: levels whose messages all wait equally long, from a
minute to three days. A message that is due in five hours waits in the level of 4 h 16 min, returns to its delay queue,
and continues to the levels for the remaining minutes. It spends the last minute in a worker's memory, as in Dramatiq.
RabbitMQ expires the messages of a queue in order, so one queue for different delays would keep near messages behind far
ones. The delay queues are quorum queues, because only they hand over an expired message safely: the message is removed
once the target queue has confirmed it. They need RabbitMQ 3.10.
"""

from __future__ import annotations

import hashlib
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime
from functools import partial
from typing import Any, Final, Literal, TypeVar
from uuid import uuid4

import pika
from dramatiq import Broker, Consumer, Message, MessageProxy
from dramatiq.brokers.rabbitmq import DEAD_MESSAGE_TTL, RabbitmqBroker, _RabbitmqConsumer, _RabbitmqMessage
from dramatiq.common import current_millis, dq_name, q_name, xq_name
from dramatiq.errors import ConnectionClosed
from pika.adapters.utils.connection_workflow import AMQPConnectorException, AMQPConnectorStackTimeout
from pika.exceptions import AMQPChannelError, AMQPError, ChannelClosedByBroker, NackError, UnroutableError

from housekeeping.brokers.dead_letters import DeadLetter, LetterAction, LetterResult, requeue
from housekeeping.brokers.dramatiq_internals import body_of_dead_letter, change_class, forked_with, read_message
from housekeeping.brokers.redis import DEAD_MESSAGE_TTL_MS
from housekeeping.core.clock import PATIENCE_S, contacting, is_impatient, is_silent, waiting
from housekeeping.core.errors import BrokerUnavailable, SettingsError
from housekeeping.core.logs import error_line
from housekeeping.core.logs import logger as named_logger
from housekeeping.core.settings import Settings

#: Seconds that a message waits in each level: from a minute to about three days, each four times the previous one. A
#: message waits in each at most three times, except in the last.
LEVELS: Final = tuple(60 * 4**power for power in range(7))


def level_for(message: Message[Any]) -> int | None:
    """Return the longest level that ends before the message is due; None in the last minute, or without a delay."""
    eta = message.options.get("eta")
    if message.queue_name == q_name(message.queue_name) or not isinstance(eta, int | float):
        return None
    left_ms = eta - current_millis()  # not divided, because a huge int does not fit a float
    return max((seconds for seconds in LEVELS if seconds * 1000 < left_ms), default=None)


def level_queue(delay_queue: str, level: int) -> str:
    """Return the name in RabbitMQ of a level of a delay queue."""
    return f"{delay_queue}.{level}s"


def level_queues(delay_queue: str) -> list[str]:
    """Return the names in RabbitMQ of all levels of a delay queue, whether they exist or not."""
    return [level_queue(delay_queue, level) for level in LEVELS]


T = TypeVar("T")
_SERVER: Final = "RabbitMQ"
#: Errors of pika if RabbitMQ does not answer. It raises AssertionError on a half-closed connection, and its only error
#: that is no AMQPError if the server accepts a connection and then hangs.
PIKA_ERRORS: Final = (AMQPError, AMQPConnectorException, OSError, AssertionError)
_PRECONDITION_FAILED: Final = 406  # AMQP's code for: declared before, with other arguments


class NotAccepted(ConnectionClosed):
    """RabbitMQ could not store a message, for example while a queue chooses its leader."""


class QueueDeclaredOtherwise(ConnectionClosed):
    """A queue that exists with other arguments; the text names them."""


def translate_rabbitmq_errors(step: Callable[[], T]) -> T:
    """Run a step and turn pika's errors into ConnectionClosed, which Dramatiq retries.

    Raises:
      ConnectionClosed: When RabbitMQ does not answer, or rejects the step.
    """
    try:
        return step()
    except PIKA_ERRORS as error:
        raise _closed(error) from None


def _closed(error: BaseException) -> ConnectionClosed:
    if isinstance(error, ChannelClosedByBroker) and error.reply_code == _PRECONDITION_FAILED:
        return QueueDeclaredOtherwise(
            f"RabbitMQ has this queue with other arguments: {error.reply_text}; "
            "delete the queue when it is empty, or use another HOUSEKEEPING_NAMESPACE"
        )
    kind = NotAccepted if isinstance(error, NackError) else ConnectionClosed
    return kind(f"RabbitMQ: {pika_error_line(error)}")


def close_connection(connection: Any) -> None:
    """Close a pika connection with all its sockets, in whatever state it is."""
    with suppress(*PIKA_ERRORS):
        if not is_silent(_SERVER):  # it would not confirm the end
            connection.close()
            return
    # pika leaves some of a lost connection to the garbage collector.
    connection._cleanup()


def pika_error_line(error: BaseException) -> str:
    """Return a pika error's text in one line; that of a failed connection is in its argument."""
    if isinstance(error, AMQPConnectorStackTimeout):
        return "timeout while connecting"  # its text has pika's own objects
    inner = error.args[0] if error.args and not str(error) else error
    return error_line(getattr(inner, "exception", inner))


logger = named_logger(__name__)


class _Delivery(_RabbitmqMessage):
    """A message, its body, and the consumer that delivered it."""

    def __init__(self, redelivered: bool, tag: int, message: Message[Any], body: bytes, by: ReliableConsumer) -> None:
        super().__init__(redelivered, tag, message)
        self.body = body
        self.consumer = by


class ReliableConsumer(_RabbitmqConsumer):
    """Dramatiq's consumer, which handles a lost connection and unreadable messages.

    RabbitMQ restarts its delivery numbers on each connection. A message that was running when the connection was lost
    would acknowledge another message of the new connection, which is then lost if its process ends. Dramatiq's own
    consumer cannot tell them apart. Here each message has its consumer, and messages of a lost connection are left to
    their redelivery.
    """

    def __init__(self, broker: ReliableRabbitmqBroker, queue_name: str, prefetch: int, timeout: int) -> None:
        try:
            super().__init__(broker, broker.physical(queue_name), prefetch, timeout)
        except Exception:
            if hasattr(self, "connection"):
                close_connection(self.connection)
            raise
        self.queue_name = queue_name

    def __next__(self) -> MessageProxy | None:
        try:
            method, _, body = next(self.iterator)
        except PIKA_ERRORS as error:
            if getattr(error, "reply_code", None) == 404:  # the queue was deleted
                self.broker.queues_pending.add(q_name(self.queue_name))
            raise ConnectionClosed(f"RabbitMQ: {pika_error_line(error)}") from None
        if method is None:
            return None
        message, wrong = read_message(body, self.queue_name)
        if message is None:
            self.broker.bury(self.queue_name, body)
            self.channel.basic_ack(method.delivery_tag)
            logger.error("Unreadable message moved to the dead letters", queue=self.queue_name, error=wrong)
            return None
        if level_for(message) is not None:
            self.broker.put(message)
            self.channel.basic_ack(method.delivery_tag)
            return None
        self.known_tags.add(method.delivery_tag)
        return _Delivery(method.redelivered, method.delivery_tag, message, body, self)

    def ack(self, message: MessageProxy) -> None:
        if self._is_from_here(message):
            super().ack(message)

    def nack(self, message: MessageProxy) -> None:
        """Move the message to the dead letters as it is now, with its error.

        RabbitMQ's own dead-lettering keeps the message as it was published, and may lose it if the server ends.
        """
        if self._is_from_here(message):
            self.broker.bury(self.queue_name, body_of_dead_letter(message) or vars(message)["body"])
            super().ack(message)

    def close(self) -> None:
        try:
            super().close()
        finally:
            close_connection(self.connection)

    def _is_from_here(self, message: MessageProxy) -> bool:
        from_here = getattr(message, "consumer", None) is self
        if not from_here:
            logger.warning(
                "Message is delivered again, because its connection was lost",
                queue=self.queue_name,
                worker=message.actor_name,
                message_id=message.message_id,
            )
        return from_here


QueueType = Literal["classic", "quorum"]

#: The first attempt finds that the connection was closed since the last send, the second opens a new one. More attempts
#: would only make the sender wait longer for a server that does not answer.
_ATTEMPTS: Final = 3
_CONNECTION: Final[Any] = vars(RabbitmqBroker)["connection"]
#: Seconds before a message is sent again that RabbitMQ could not store. A queue chooses another leader within a second.
_ELECTION_S: Final = 1.0
#: Of a quorum queue: more deliveries than a message ever has. RabbitMQ 4 would end at 20, without the hooks of the
#: middleware, and drop a dead letter. It counts each delivery without acknowledgement: of every message that a killed
#: worker had fetched, and of every dead letter that was only read.
_QUORUM: Final = {"x-queue-type": "quorum", "x-delivery-limit": 2**31 - 1}


class ReliableRabbitmqBroker(RabbitmqBroker):
    """Dramatiq's RabbitMQ broker, which loses no send and keeps delayed messages in RabbitMQ.

    RabbitMQ confirms each send. A send whose connection is lost is repeated on a new one. The hooks of the middleware
    run once for all attempts. A message that is not due within a minute waits in RabbitMQ (`delay_queues`), because
    RabbitMQ disconnects a consumer that holds a message for half an hour.

    Parameters:
      prefix: Prefix of every queue's name, so that applications can share a RabbitMQ.
      queue_type: ``quorum``: each queue is on most nodes of the cluster, and survives the loss of a minority of them.
        ``classic``: it is on one node.
    """

    _dead_message_ttl_ms: int = DEAD_MESSAGE_TTL_MS

    def __init__(self, *, prefix: str = "", queue_type: QueueType = "classic", **parameters: Any) -> None:
        super().__init__(**{"confirm_delivery": True, **parameters})
        self._prepare(prefix, queue_type)

    def _prepare(self, prefix: str, queue_type: QueueType = "classic") -> None:
        self.prefix = prefix
        # No argument for classic queues: existing ones were declared without it.
        self._type_arguments: dict[str, Any] = _QUORUM if queue_type == "quorum" else {}
        self._levels: set[str] = set()  # those known to exist
        self._owners: dict[Any, threading.Thread] = {}
        self._parents_connections: list[Any] = []
        forked_with.add(self)

    @staticmethod
    def adopt(broker: Broker) -> None:
        """Turn a RabbitMQ broker of Dramatiq's own class into a `ReliableRabbitmqBroker`; any other stays as it is.

        Its queues keep their names and arguments. Its sends are confirmed from now on.
        """
        if type(broker) is RabbitmqBroker:
            del broker.channel  # opened without confirmations, if at all
            change_class(broker, ReliableRabbitmqBroker)
            broker.confirm_delivery = True
            broker._prepare("")  # type: ignore[attr-defined]
            # From the environment if set there: existing queues have it already.
            broker._dead_message_ttl_ms = DEAD_MESSAGE_TTL  # type: ignore[attr-defined]

    @property
    def consumer_class(self) -> type[ReliableConsumer]:
        return ReliableConsumer

    def physical(self, queue_name: str) -> str:
        """Return the name in RabbitMQ of one of Dramatiq's queues."""
        return f"{self.prefix}{queue_name}"

    def consume(self, queue_name: str, prefetch: int = 1, timeout: int = 5000) -> Consumer:
        """Return a new consumer for a queue; called by Dramatiq at the start and after each lost connection."""
        consumer: Consumer = translate_rabbitmq_errors(
            lambda: super(ReliableRabbitmqBroker, self).consume(queue_name, prefetch, timeout)
        )
        return consumer

    def enqueue(self, message: Message[Any], *, delay: int | None = None) -> Message[Any]:
        """Enqueue a message; returns when RabbitMQ has confirmed it.

        Parameters:
          delay: In milliseconds.

        Raises:
          ConnectionClosed: When RabbitMQ does not answer, or rejects it.
        """
        queue_name = message.queue_name
        # Before the hooks, so that no key is reserved if RabbitMQ does not answer.
        self._retry(lambda: self.declare_queue(queue_name, ensure=True))
        if delay is not None:
            message = message.copy(queue_name=dq_name(queue_name), options={"eta": current_millis() + delay})
        self.emit_before("enqueue", message, delay)
        self.put(message)
        self.emit_after("enqueue", message, delay)
        return message

    def put(self, message: Message[Any]) -> None:
        """Publish a message to its queue, or to the delay level in which it waits.

        Raises:
          ConnectionClosed: When RabbitMQ does not answer, or rejects it.
        """
        level = level_for(message)
        properties = self.properties_of(message)
        self._retry(lambda: self._publish(message.queue_name, message.encode(), properties, level))

    def put_many(self, messages: Sequence[Message[Any]]) -> None:
        """Publish messages of one queue without delay in one transaction, in five round trips for any number.

        RabbitMQ's transactions are atomic within one queue. With confirmations, pika would wait for each before it
        sends the next message.

        Raises:
          ConnectionClosed: When RabbitMQ does not answer, or rejects them. They may be in the queue nevertheless.
        """
        queue_name, returned = messages[0].queue_name, list[Any]()

        def publish() -> None:
            self.declare_queue(queue_name, ensure=True)
            returned.clear()
            channel = self.connection.channel()
            channel.add_on_return_callback(lambda *given: returned.append(given))
            channel.tx_select()
            name = self.physical(queue_name)
            for each in messages:
                channel.basic_publish("", name, each.encode(), self.properties_of(each), mandatory=True)
            channel.tx_commit()
            self.connection.process_data_events(0)  # pika reports returned messages only here
            channel.close()
            if returned:  # the queue was deleted; nothing was enqueued
                self.queues_pending.add(queue_name)
                raise UnroutableError(returned)

        self._retry(publish)

    def bury(self, queue_name: str, body: bytes) -> None:
        """Publish a message to the dead letters of a queue, with a new AMQP message id.

        Raises:
          ConnectionClosed: When RabbitMQ does not answer.
        """
        properties = self.properties(message_id=str(uuid4()))
        self._retry(lambda: self._publish(xq_name(q_name(queue_name)), body, properties))

    def properties_of(self, message: Message[Any]) -> Any:
        """Return the properties of a message. A priority that is not a number from 0 to 255 is left out."""
        priority = message.options.get("broker_priority")
        is_octet = isinstance(priority, int) and 0 <= priority <= 255
        return self.properties(priority=priority if is_octet else None)

    @staticmethod
    def properties(**more: Any) -> Any:
        """Return the properties of every message: persistent, with the time."""
        persistent = pika.DeliveryMode.Persistent.value
        return pika.BasicProperties(delivery_mode=persistent, timestamp=int(time.time()), **more)

    def _publish(self, queue_name: str, body: bytes, properties: Any, level: int | None = None) -> None:
        self.declare_queue(q_name(queue_name), ensure=True)
        target = self.physical(queue_name)
        if level is not None:
            target, delay_queue = level_queue(target, level), target
            if target not in self._levels:
                self.channel.queue_declare(
                    target,
                    durable=True,
                    arguments={
                        "x-queue-type": "quorum",
                        "x-message-ttl": level * 1000,
                        "x-dead-letter-exchange": "",
                        "x-dead-letter-routing-key": delay_queue,
                        "x-dead-letter-strategy": "at-least-once",
                        "x-overflow": "reject-publish",  # required by the strategy
                    },
                )
                self._levels.add(target)
        try:
            self.channel.basic_publish("", target, body, properties, mandatory=True)
        except UnroutableError:
            # The queue was deleted.
            self.queues_pending.add(q_name(queue_name))
            self._levels.discard(target)
            raise

    def _retry(self, step: Callable[[], T]) -> T:
        """Run a repeatable step, on a new connection if the last one is broken."""
        for _ in range(_ATTEMPTS - 1):
            try:
                return translate_rabbitmq_errors(step)
            except QueueDeclaredOtherwise:
                del self.connection
                raise
            except NotAccepted:
                time.sleep(_ELECTION_S)
            except ConnectionClosed:
                del self.connection
        try:
            return translate_rabbitmq_errors(step)
        except ConnectionClosed:
            del self.connection
            raise

    def _ensure_queue(self, canonical_queue_name: str) -> None:
        # Without Dramatiq's own retries, which would hide that a queue exists with other arguments.
        if canonical_queue_name in self.queues_pending:
            try:
                self._declare_queue(canonical_queue_name)
                self._declare_dq_queue(canonical_queue_name)
                self._declare_xq_queue(canonical_queue_name)
            except AMQPError:
                del self.connection
                raise
            self.queues_pending.discard(canonical_queue_name)

    def _build_queue_arguments(self, queue_name: str) -> dict[str, Any]:
        arguments: dict[str, Any] = super()._build_queue_arguments(queue_name)
        own = {"x-dead-letter-routing-key": self.physical(xq_name(queue_name))}
        return {**arguments, **own, **self._type_arguments}

    def _declare_queue(self, queue_name: str) -> Any:
        return self._declare(queue_name, self._build_queue_arguments(queue_name))

    def _declare_dq_queue(self, queue_name: str) -> Any:
        return self._declare(dq_name(queue_name), self._build_queue_arguments(queue_name))

    def _declare_xq_queue(self, queue_name: str) -> Any:
        return self._declare(xq_name(queue_name), {"x-message-ttl": self._dead_message_ttl_ms, **self._type_arguments})

    def _declare(self, queue_name: str, arguments: dict[str, Any]) -> Any:
        return self.channel.queue_declare(queue=self.physical(queue_name), durable=True, arguments=arguments)

    def flush(self, queue_name: str) -> None:
        """Delete all messages of a queue, including delayed and dead ones."""
        super().flush(self.physical(queue_name))
        for name in level_queues(self.physical(dq_name(queue_name))):
            try:
                self.channel.queue_purge(name)
            except AMQPChannelError:
                del self.channel  # closed by RabbitMQ, because there is no such queue

    @property
    def connection(self) -> Any:
        """Return this thread's connection. Before a new one is opened, connections of ended threads are closed."""
        if getattr(self.state, "connection", None) is None:
            self._close_connections_of_ended_threads()
        with contacting(_SERVER, PIKA_ERRORS):
            connection = _CONNECTION.fget(self)
        self._owners[connection] = threading.current_thread()
        return connection

    @connection.deleter
    def connection(self) -> None:
        connection = getattr(self.state, "connection", None)
        _CONNECTION.fdel(self)
        if connection is not None:
            close_connection(connection)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Connect and wait for answers in the block. Within `impatient`, end it with an error if RabbitMQ hangs.

        Raises:
          BrokerUnavailable: When RabbitMQ does not answer.
        """
        if is_impatient():
            for parameters in self.parameters:
                parameters.socket_timeout = parameters.stack_timeout = PATIENCE_S
        try:
            with waiting(_SERVER, partial(self._hang_up_if_silent, vars(self.state))):
                yield
        except (ConnectionClosed, *PIKA_ERRORS) as error:
            del self.connection
            text = pika_error_line(error).removeprefix("RabbitMQ: ")
            raise BrokerUnavailable(f"RabbitMQ did not answer: {text}") from error

    def _hang_up_if_silent(self, state: dict[str, Any]) -> None:
        """Shut down the connection of a thread if RabbitMQ no longer accepts new ones."""
        connection = state.get("connection")
        if connection is None:
            return  # pika limits the time for a new one
        try:
            with contacting(_SERVER, PIKA_ERRORS):
                close_connection(pika.BlockingConnection(self.parameters))
        except PIKA_ERRORS:
            if is_silent(_SERVER):
                with suppress(OSError, AttributeError):  # closed meanwhile
                    connection._impl._transport._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connections of all threads."""
        super().close()
        for connection in self.connections:
            close_connection(connection)

    def _close_connections_of_ended_threads(self) -> None:
        for connection, thread in list(self._owners.items()):
            is_open = connection in self.connections
            if is_open and thread.is_alive():
                continue
            # Only the thread that removes it closes it: two threads in one pika connection break or block each other.
            if self._owners.pop(connection, None) is not None and is_open:
                self.connections.discard(connection)
                for channel in list(self.channels):
                    if channel.connection is connection:
                        self.channels.discard(channel)
                close_connection(connection)

    def after_fork(self) -> None:
        """Stop using the parent's connections in a forked child, because both would write to them."""
        self._parents_connections += [*self.connections, *self.channels]
        self.connections, self.channels, self._owners = set(), set(), {}
        self.state = threading.local()


#: Heartbeat interval in seconds. Either side notices within two intervals that the other is gone.
HEARTBEAT_S: Final = 30
#: Seconds that a send waits while RabbitMQ blocks publishers, because its memory or disk is full. Then it fails.
BLOCKED_S: Final = 30


def rabbitmq_broker(settings: Settings) -> ReliableRabbitmqBroker:
    """Return the RabbitMQ broker that the settings name, without middleware; it connects with its first message.

    Several URLs, separated by semicolons, are the nodes of a cluster. The first that answers is used.

    Raises:
      SettingsError: When no URL is set, or pika cannot read it.
    """
    # Errors are raised. pika also logs them, in several lines for each attempt.
    logging.getLogger("pika").setLevel(logging.CRITICAL)
    urls = (settings.broker_url or "").split(";")
    try:
        for url in urls:
            pika.URLParameters(url)
    except (ValueError, TypeError) as error:
        raise SettingsError(f"HOUSEKEEPING_BROKER_URL: pika says: {error_line(error)}") from None
    broker = ReliableRabbitmqBroker(
        prefix=f"{settings.namespace}.", queue_type=settings.rabbitmq_queue_type, url=urls, middleware=[]
    )
    for url, parameters in zip(urls, broker.parameters, strict=True):
        # Parameters in the URL win.
        if "heartbeat=" not in url:
            parameters.heartbeat = HEARTBEAT_S
        if "blocked_connection_timeout=" not in url:
            parameters.blocked_connection_timeout = BLOCKED_S
    return broker


def lengths(settings: Settings, names: list[str]) -> dict[str, tuple[int, int, int]]:
    """Return the messages of each queue: waiting, delayed, dead. A missing queue has none.

    Raises:
      BrokerUnavailable: When RabbitMQ does not answer, also without names.
    """
    broker = rabbitmq_broker(settings)
    try:
        with broker.waiting():
            assert broker.channel
            return {
                name: (_length(broker, name), _delayed(broker, name), _length(broker, xq_name(name))) for name in names
            }
    finally:
        broker.close()


def _delayed(broker: ReliableRabbitmqBroker, name: str) -> int:
    delayed = dq_name(name)
    return sum(_length(broker, each) for each in (delayed, *level_queues(delayed)))


def _length(broker: ReliableRabbitmqBroker, name: str) -> int:
    try:
        declared: Any = broker.channel.queue_declare(broker.physical(name), passive=True)
    except ChannelClosedByBroker as error:
        del broker.channel
        if error.reply_code == 404:  # there is no such queue
            return 0
        raise
    return int(declared.method.message_count)


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

    def __init__(self, broker: ReliableRabbitmqBroker) -> None:
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
                            yield requeue(self._broker, letter, move)
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
        return int(self._broker._declare_xq_queue(queue).method.message_count)

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
        return self._broker.physical(xq_name(queue))

    @contextmanager
    def _channel(self) -> Iterator[Any]:
        with self._broker.waiting():
            # The old connection may be lost, because an idle thread answers no heartbeats.
            channel = self._broker._retry(lambda: self._broker.connection.channel())
            try:
                yield channel
            finally:
                with suppress(*PIKA_ERRORS):
                    channel.close()


def _delivered(queue: str, method: Any, properties: Any, body: bytes) -> DeadLetter:
    # Without an id: written by Dramatiq's own broker, before it was hardened.
    broker_id = properties.message_id or hashlib.sha256(body).hexdigest()[:32]
    return DeadLetter(broker_id, queue, (properties.timestamp or 0) * 1000, body, method.delivery_tag)
