"""Enqueues what must not be lost, also while the broker is away."""

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
#: What it looks like when Redis or RabbitMQ is away; the last one is a name that cannot be looked up.
_AWAY: Final = (redis.RedisError, BrokerConnectionError, StoreUnavailable, RedisUnavailable, OSError)
#: What Redis answers to who asks for something that it will never do: no waiting mends it.
_REFUSED: Final = (redis.DataError, NoPermissionError, ClusterCrossSlotError)


def retry_until_available(step: Callable[[], T], not_yet: str) -> T:
    """Do a step that may be repeated, and while the broker is away do it again.

    In a hook after the actor an error would be swallowed by Dramatiq, and the message acknowledged: lost. Waiting
    costs nothing, because without its broker this thread gets no other message; a process that ends meanwhile
    has not acknowledged it, and the broker delivers it again.

    Parameters:
      not_yet: What the log says for as long as it cannot be done.

    Raises:
      redis.RedisError: Redis is there and refuses it.
    """
    while True:
        try:
            return step()
        except _REFUSED:
            raise
        except _AWAY as error:
            _wait(not_yet, error_line(error))
        except Interrupt:
            # Meant for the actor, which is done. It may have come after the step was done; then it is done
            # twice, which is better than not at all, and an idempotent actor executes its message once.
            continue


def enqueue_reliably(broker: Broker, message: Message[Any] | MessageProxy, delay: int | None = None) -> None:
    """Enqueue, and while the broker is away try again."""
    # The very same message each time: another would be a duplicate of what the first try has reserved.
    retry_until_available(lambda: broker.enqueue(message, delay=delay), "A message cannot be enqueued yet")  # type: ignore[arg-type]


def _wait(not_yet: str, reason: str) -> None:
    try:
        logger.warning(not_yet, error=reason)
        time.sleep(_PAUSE_S)
    except Interrupt:
        return


class ReliableBroker:
    """Stands in for the broker in one of Dramatiq's hooks: what is sent there waits for the broker to come back.

    Parameters:
      enqueue: Takes the place of the broker's `enqueue`.
    """

    def __init__(
        self, broker: Broker, enqueue: Callable[[Message[Any] | MessageProxy, int | None], None] | None = None
    ) -> None:
        self._broker = broker
        self._enqueue = enqueue or functools.partial(enqueue_reliably, broker)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._broker, name)

    def get_actor(self, name: str) -> _ReliableActor:
        """The actor, whose `send` is patient, too."""
        return _ReliableActor(self._broker, self._broker.get_actor(name))

    def enqueue(self, message: Message[Any] | MessageProxy, *, delay: int | None = None) -> None:
        """Enqueue at last."""
        self._enqueue(message, delay)


class _ReliableActor:
    def __init__(self, broker: Broker, actor: Actor[..., Any]) -> None:
        self._broker = broker
        self._actor = actor

    def __getattr__(self, name: str) -> Any:
        return getattr(self._actor, name)

    def send(self, *args: Any, **kwargs: Any) -> None:
        message = self._actor.message(*args, **kwargs)
        never_drop(message)  # a callback, which somebody waits for; semantics.md, D2
        enqueue_reliably(self._broker, message)


def patient(middleware: M) -> M:
    """The same middleware, which loses nothing of what it sends after a message: Dramatiq's or an application's own.

    A message that goes back to the queue has not ended: it has no callback yet. One whose follower can
    never be sent, because its result is nothing that a message can carry, becomes a dead letter.
    """
    hook: Callable[..., None] = middleware.after_process_message

    @functools.wraps(hook)
    def with_patience(
        broker: Broker, message: MessageProxy, *, result: Any = None, exception: BaseException | None = None
    ) -> None:
        if isinstance(exception, Requeue | Shutdown):
            return
        try:
            hook(ReliableBroker(broker), message, result=result, exception=exception)
        except Exception as error:
            if exception is None:
                message.fail()  # Dramatiq would acknowledge it; a failed one has its retry already
                message.stuff_exception(error)  # what it died of, for the dead letter
            raise

    middleware.after_process_message = with_patience  # type: ignore[method-assign]
    return middleware
