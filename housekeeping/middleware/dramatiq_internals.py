"""Uses of internals of Dramatiq and periodiq, where neither has an extension point.

Each function says why the public interface is not enough. ``tests/unit/middleware/test_dramatiq_internals.py`` fails
when a release of Dramatiq or periodiq changes what is used here.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from threading import Thread
from typing import Any

import periodiq
from dramatiq import Broker, MessageProxy
from dramatiq.brokers.redis import RedisBroker
from dramatiq.brokers.redis import _RedisConsumer as RedisConsumer
from dramatiq.common import current_millis
from dramatiq.middleware import TimeLimit

#: `RedisConsumer` is a base class: `RedisBroker.consumer_class` is public, the class itself is not.
__all__ = [
    "RedisConsumer",
    "called_by_periodiq",
    "change_class",
    "dispatch_arguments",
    "dispatch_script",
    "enqueues_by_dispatch",
    "exception_of",
    "metrics_handler",
    "replace_manager",
]


def enqueues_by_dispatch(broker: RedisBroker) -> bool:
    """Return whether the broker enqueues by Dramatiq's own method; False for a subclass or object that overrides it."""
    overridden = hasattr(type(broker), "do_enqueue") or "do_enqueue" in vars(broker)
    return not overridden and getattr(broker.enqueue, "__func__", None) is RedisBroker.enqueue


def dispatch_script(broker: RedisBroker) -> Any:
    """Return the broker's Lua script, which executes all of its commands.

    The library's script contains it, so that one script takes the deduplication key and enqueues the message.
    """
    scripts: dict[str, Any] = broker.scripts
    return scripts["dispatch"]


def dispatch_arguments(
    broker: RedisBroker, command: str, queue_name: str, *args: Any, maintenance: bool = True
) -> list[Any]:
    """Return the arguments that a ``do_`` method of `RedisBroker` passes to its script.

    Parameters:
      maintenance: Whether the script may also look for messages of dead workers.
    """
    internals: Any = broker
    return [
        command,
        current_millis(),
        queue_name,
        internals.broker_id,
        internals.heartbeat_timeout,
        internals.dead_message_ttl,
        internals._should_do_maintenance(command) if maintenance else 0,
        internals._max_unpack_size(),
        *args,
    ]


def change_class(broker: Broker, kind: type[Broker]) -> None:
    """Change the class of a broker to a subclass.

    An application's actors and modules hold references to the broker that it made. A new broker would not reach them.
    """
    broker.__class__ = kind


def exception_of(message: MessageProxy) -> BaseException | None:
    """Return the exception that failed a message; Dramatiq does not pass it to the hooks of a dead letter."""
    exception: BaseException | None = message._exception
    return exception


def replace_manager(limits: TimeLimit, make_manager: Callable[[float], Any]) -> None:
    """Replace the thread with which `TimeLimit` watches deadlines. With gevent there is none; nothing is replaced.

    Parameters:
      make_manager: Returns the new manager, given the seconds between two checks of the deadlines.
    """
    internals: Any = limits
    if isinstance(internals.manager, Thread):
        internals.manager = make_manager(vars(internals.manager)["interval"])


def metrics_handler() -> Any:
    """Return the HTTP handler of Dramatiq's metrics page, whose server has no setting for the host."""
    from dramatiq.middleware.prometheus import _metrics_handler

    return _metrics_handler


def called_by_periodiq() -> bool:
    """Return whether this thread runs periodiq's command, which has no hook for its start."""
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_code is periodiq.main.__code__:
            return True
    return False
