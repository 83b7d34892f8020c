"""Errors of pika, translated to those that Dramatiq retries."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, TypeVar

from dramatiq.errors import ConnectionClosed
from pika.exceptions import AMQPError, ChannelClosedByBroker, NackError

from housekeeping.core.sanitize import error_line

T = TypeVar("T")
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
    except (AMQPError, OSError, AssertionError) as error:  # pika raises AssertionError on a half-closed connection
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
    try:
        connection.close()
    except (AMQPError, OSError, AssertionError):
        # pika leaves some of a lost connection to the garbage collector.
        connection._cleanup()


def pika_error_line(error: BaseException) -> str:
    """Return a pika error's text in one line; that of a failed connection is in its argument."""
    inner = error.args[0] if error.args and not str(error) else error
    return error_line(getattr(inner, "exception", inner))
