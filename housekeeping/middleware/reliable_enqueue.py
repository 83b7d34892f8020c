"""Enqueueing that waits for an unreachable broker, for messages that must not be lost."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any, Final, TypeVar

import redis
from dramatiq import Actor, Broker, Message, MessageProxy, Middleware
from dramatiq.errors import BrokerConnectionError
from dramatiq.middleware import Interrupt, Shutdown
from redis.exceptions import ClusterCrossSlotError, NoPermissionError

from housekeeping.core.errors import RedisUnavailable
from housekeeping.core.middleware_errors import Requeue, StoreUnavailable
from housekeeping.core.sanitize import error_line
from housekeeping.core.telemetry.logs import logger as named_logger
from housekeeping.middleware.deduplication.options import never_drop

logger = named_logger(__name__)

T = TypeVar("T")
M = TypeVar("M", bound=Middleware)

_PAUSE_S: Final = 1.0  # between two tries while the broker is away
#: Errors raised while Redis or RabbitMQ is down. OSError: the host name cannot be resolved.
_AWAY: Final = (redis.RedisError, BrokerConnectionError, StoreUnavailable, RedisUnavailable, OSError)
#: Errors of Redis that waiting does not resolve.
_REFUSED: Final = (redis.DataError, NoPermissionError, ClusterCrossSlotError)


def retry_until_available(step: Callable[[], T], event: str) -> T:
    """Repeat a step until the broker answers; the step must be safe to repeat.

    Dramatiq swallows an error in a hook after the actor and acknowledges the message, which is then lost. Waiting
    costs nothing, because without its broker this thread gets no other message. If the process ends meanwhile, the
    message is not acknowledged, and the broker delivers it again.

    Parameters:
      event: The log event for each failed attempt.

    Raises:
      redis.RedisError: Redis answers and rejects the step.
    """
    while True:
        try:
            return step()
        except _REFUSED:
            raise
        except _AWAY as error:
            _wait(event, error_line(error))
        except Interrupt:
            # The interrupt was meant for the actor, which has ended. If it arrived after the step, the step is
            # repeated: a second message is better than none, and an idempotent actor executes its message once.
            continue


def enqueue_reliably(broker: Broker, message: Message[Any] | MessageProxy, delay: int | None = None) -> None:
    """Enqueue a message, trying again until the broker answers."""
    # The same message each time: a new one would count as a duplicate of the first attempt's.
    retry_until_available(lambda: broker.enqueue(message, delay=delay), "Message cannot be enqueued yet, tried again")  # type: ignore[arg-type]


def _wait(event: str, reason: str) -> None:
    try:
        logger.warning(event, error=reason)
        time.sleep(_PAUSE_S)
    except Interrupt:
        return


class ReliableBroker:
    """Stand-in for a broker in Dramatiq's hooks, whose ``enqueue`` and ``send`` wait for the broker to answer.

    Parameters:
      enqueue: Called in place of the broker's ``enqueue``.
    """

    def __init__(
        self, broker: Broker, enqueue: Callable[[Message[Any] | MessageProxy, int | None], None] | None = None
    ) -> None:
        self._broker = broker
        self._enqueue = enqueue or functools.partial(enqueue_reliably, broker)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._broker, name)

    def get_actor(self, name: str) -> _ReliableActor:
        """Return a stand-in for the actor; its ``send`` waits for the broker as well."""
        return _ReliableActor(self._broker, self._broker.get_actor(name))

    def enqueue(self, message: Message[Any] | MessageProxy, *, delay: int | None = None) -> None:
        """Enqueue a message, trying again until the broker answers."""
        self._enqueue(message, delay)


class _ReliableActor:
    def __init__(self, broker: Broker, actor: Actor[..., Any]) -> None:
        self._broker = broker
        self._actor = actor

    def __getattr__(self, name: str) -> Any:
        return getattr(self._actor, name)

    def send(self, *args: Any, **kwargs: Any) -> None:
        message = self._actor.message(*args, **kwargs)
        never_drop(message)  # a callback, which others depend on; promise D2
        enqueue_reliably(self._broker, message)


def waiting_for_broker(middleware: M) -> M:
    """Make the ``after_process_message`` hook of a middleware wait for the broker when it sends messages.

    Works for Dramatiq's middleware and an application's own. The hook is not called for a message that goes back to the
    queue, because it has not ended. If the hook fails, for example because a result cannot be encoded, the message
    becomes a dead letter.
    """
    hook: Callable[..., None] = middleware.after_process_message

    @functools.wraps(hook)
    def run_hook(
        broker: Broker, message: MessageProxy, *, result: Any = None, exception: BaseException | None = None
    ) -> None:
        if isinstance(exception, Requeue | Shutdown):
            return
        try:
            hook(ReliableBroker(broker), message, result=result, exception=exception)
        except Exception as error:
            if exception is None:
                message.fail()  # Dramatiq would acknowledge it. A message that failed before has its retry already.
                message.stuff_exception(error)  # for the dead letter
            raise

    middleware.after_process_message = run_hook  # type: ignore[method-assign]
    return middleware
