"""Uses of the internals of Dramatiq and periodiq, and exceptions that decide what happens to a message.

Dramatiq gives meaning to the types of a hook's exceptions. ``SkipMessage`` (its own) drops a message, and any other
``MiddlewareError`` fails it. No other exception may leave a ``before_`` hook, because Dramatiq logs it *and runs the
actor anyway*.

Internals are used where neither library has an extension point; each function says why the public interface is not
enough. ``tests/unit/middleware/test_dramatiq_internals.py`` fails when a release of Dramatiq or periodiq changes what
is used here.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from numbers import Number
from threading import Thread
from types import FrameType
from typing import Any, Final
from weakref import WeakSet

import dramatiq.cli
import dramatiq.worker
import periodiq
from dramatiq import Broker, Message, MessageProxy, Middleware, Worker, get_encoder
from dramatiq.brokers.redis import RedisBroker, _RedisConsumer
from dramatiq.common import current_millis
from dramatiq.encoder import JSONEncoder
from dramatiq.errors import DecodeError, Retry
from dramatiq.middleware import MiddlewareError, SkipMessage, TimeLimit
from dramatiq.results import ResultBackend
from dramatiq.results.backends import RedisBackend
from dramatiq.results.result import wrap_exception

from housekeeping.core.errors import DeclarationError, RedisUnavailable, SettingsError
from housekeeping.core.logs import error_line, typed_error_line
from housekeeping.core.logs import logger as named_logger
from housekeeping.core.redis import is_storable, translate_redis_errors

logger = named_logger(__name__)


class SkipEnqueue(MiddlewareError):
    """Keeps a message from being enqueued; its sender gets the message back as if it had been.

    Attributes:
      reason: Why, as the ledger and the logs show it.
      duplicate_of: Id of the live message that this one duplicates, if any.
    """

    def __init__(self, reason: str, duplicate_of: str | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.duplicate_of = duplicate_of


class Skip(SkipMessage):
    """Drops a message without running its actor.

    Attributes:
      reason: Why, as the ledger and the logs show it.
      duplicate_of: Id of the message that does the work instead, or has done it; None if there is no other.
    """

    def __init__(self, reason: str, duplicate_of: str | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.duplicate_of = duplicate_of


class SkipDelivery(Skip):
    """Drops a delivery of a message whose outcome belongs to another delivery."""


class Requeue(MiddlewareError, Retry):
    """Puts the message back into its queue without using up a retry.

    Parameters:
      after: Delay until it can be delivered again.
    """

    def __init__(self, reason: str, after: timedelta = timedelta()) -> None:
        super().__init__(reason)
        self.delay = int(after.total_seconds() * 1000)


class InvalidOption(DeclarationError, MiddlewareError):
    """An actor was declared with an option that cannot work; the text shows the right form."""


class StoreUnavailable(MiddlewareError):
    """Redis did not answer. The message fails and is retried, because nothing may run unprotected."""


class GuardUnavailable(MiddlewareError):
    """A protection of the run, such as its lease, failed for another reason than Redis. The message is retried."""


@contextmanager
def fail_message_on_error() -> Iterator[None]:
    """Turn every error into one that fails the message; Dramatiq would log others and run the actor unprotected.

    Raises:
      StoreUnavailable: In place of `RedisUnavailable` and of redis-py's errors.
      GuardUnavailable: In place of any other error that is not a ``MiddlewareError``.
    """
    try:
        with translate_redis_errors():
            yield
    except MiddlewareError:
        raise
    except RedisUnavailable as error:
        raise StoreUnavailable(str(error)) from error
    except Exception as error:
        raise GuardUnavailable(typed_error_line(error)) from error


#: SHA-1 digests of the dispatch scripts that `enqueue.lua` can contain: that of Dramatiq 2.2.1.
_DISPATCH_DIGESTS: Final = frozenset({"fdacc359c79a5adc3b8eeb53ff5772d7c42144e3"})

#: Base class of consumers: `RedisBroker.consumer_class` is public, the class itself is not.
RedisConsumer = _RedisConsumer


def enqueues_by_dispatch(broker: RedisBroker) -> bool:
    """Return whether the broker enqueues by Dramatiq's own method; False for a subclass or object that overrides it."""
    overridden = hasattr(type(broker), "do_enqueue") or "do_enqueue" in vars(broker)
    return not overridden and getattr(broker.enqueue, "__func__", None) is RedisBroker.enqueue


def dispatch_script(broker: RedisBroker) -> Any:
    """Return the broker's Lua script, which executes all of its commands.

    The library's script contains it, so that one script takes the deduplication key and enqueues the message.

    Raises:
      SettingsError: When it is not the script that the library was written for.
    """
    scripts: dict[str, Any] = broker.scripts
    script = scripts["dispatch"]
    if script.sha not in _DISPATCH_DIGESTS:
        raise SettingsError(
            f"Dramatiq {dramatiq.__version__} enqueues with a script that this release does not know "
            f"(SHA-1 {script.sha}); install the dramatiq that it was tested with: 2.2.1"
        )
    return script


def dispatch_arguments(broker: RedisBroker, command: str, queue_name: str, *args: Any) -> list[Any]:
    """Return the arguments that a ``do_`` method of `RedisBroker` passes to its script."""
    internals: Any = broker
    return [
        command,
        current_millis(),
        queue_name,
        internals.broker_id,
        internals.heartbeat_timeout,
        internals.dead_message_ttl,
        internals._should_do_maintenance(command),
        internals._max_unpack_size(),
        *args,
    ]


def encode(message: Message[Any] | MessageProxy) -> bytes:
    """Return the encoded message, as its own method does in 2.5 times the time.

    Dramatiq's looks up the fields and makes an encoder for each message.
    """
    if type(message) is not Message or type(get_encoder()) is not JSONEncoder:
        return message.encode()
    return _JSON.encode(vars(message)).encode()  # an instance has its fields and nothing else, in their order


def body_of_dead_letter(message: MessageProxy) -> bytes | None:
    """Return the encoded message; None, and a log line, if a middleware has left something in it that has no JSON.

    An error would leave the message with its process: it would never end, and keep its place in the prefetch.
    """
    try:
        body: bytes = message.encode()
        return body
    except Exception as error:
        logger.error(
            "Dead letter is kept as it was delivered",
            worker=message.actor_name,
            message_id=message.message_id,
            error=typed_error_line(error),
        )
        return None


#: As Dramatiq's encoder.
_JSON: Final = json.JSONEncoder(separators=(",", ":"))


def change_class(broker: Broker, kind: type[Broker]) -> None:
    """Change the class of a broker to a subclass.

    An application's actors and modules hold references to the broker that it made. A new broker would not reach them.
    """
    broker.__class__ = kind


#: Brokers whose method ``after_fork`` is called in a forked child.
forked_with: Final[WeakSet[Any]] = WeakSet()


def _after_fork() -> None:
    for broker in forked_with:
        broker.after_fork()


os.register_at_fork(after_in_child=_after_fork)


#: Options with which Dramatiq calculates.
_NUMBERS: Final = ("max_age", "max_backoff", "max_retries", "min_backoff", "retries", "time_limit")


def wrong_option(options: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return the name of an option of an actor or message that breaks Dramatiq, and what it should be; else None.

    Dramatiq ignores a limit that is no number, and loses a retry. With other ``throws`` its thread ends at the first
    error of the actor, and the message is lost.
    """
    for name in _NUMBERS:
        if name in options and not isinstance(options[name], Number | None):
            return name, "a number"
    with suppress(TypeError):
        isinstance(None, options.get("throws") or ())
        return None
    return "throws", "an exception class, or a tuple of them"


_TYPES: Final[dict[str, type | tuple[type, ...]]] = {
    "actor_name": str,
    "message_id": str,
    "message_timestamp": (int, float),  # other programs send fractions of a millisecond
    "kwargs": dict,
    "options": dict,
}
#: Deepest nesting of a message. Python reads JSON that is nested almost as deeply as its stack allows, which is 1000
#: frames. A thread that logs such a message, or enqueues it again, would end, and lose the message.
_DEEPEST: Final = 500


def read_message(body: bytes, queue: str | None = None) -> tuple[Message[Any] | None, str]:
    """Return the message, or None and why it cannot be read, or taken from this queue."""
    try:
        message: Message[Any] = Message.decode(body)
    except (DecodeError, RecursionError) as error:
        return None, error_line(error.__cause__ or error)
    wrong = _wrong_type(message, body)
    if not wrong and queue not in (None, message.queue_name):
        wrong = f"it says that its queue is {message.queue_name!r}"
    return (None, wrong) if wrong else (message, "")


def _wrong_type(message: Message[Any], body: bytes) -> str:
    """Return which part of a message is invalid, or an empty text.

    Note: It leaves out the value, which may be a password.
    """
    for name, kind in _TYPES.items():
        part = getattr(message, name)
        if not isinstance(part, kind):
            return f"its {name} is of type {type(part).__name__}"
    if not is_storable(message.message_id):
        return "its message_id contains a NUL character or a lone surrogate"
    if wrong := wrong_option(message.options):
        return f"its option {wrong[0]} is of type {type(message.options[wrong[0]]).__name__}"
    if body.count(b"[") + body.count(b"{") > _DEEPEST and _is_deep([*message.args, message.kwargs, message.options]):
        return f"it is nested more than {_DEEPEST} levels deep"
    return ""


def _is_deep(values: list[Any]) -> bool:
    for _ in range(_DEEPEST):
        nested = [each.values() if isinstance(each, dict) else each for each in values if isinstance(each, dict | list)]
        values = [inner for each in nested for inner in each]
    return bool(values)


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


def store_exceptions(
    backend: ResultBackend, entries: Sequence[tuple[Message[Any] | MessageProxy, Exception]], ttl_ms: int
) -> None:
    """Store exceptions as the results of messages, on Redis in one round trip. The backend stores one at a time."""
    if type(backend) is not RedisBackend:
        for message, error in entries:
            backend.store_exception(message, error, ttl_ms)
        return
    on_redis: Any = backend
    with on_redis.client.pipeline() as pipeline:
        for message, error in entries:
            key = on_redis.build_message_key(message)
            pipeline.delete(key)
            pipeline.lpush(key, on_redis.encoder.encode(wrap_exception(error)))
            pipeline.pexpire(key, ttl_ms)
        pipeline.execute()


def metrics_handler() -> Any:
    """Return the HTTP handler of Dramatiq's metrics page, whose server has no setting for the host."""
    from dramatiq.middleware.prometheus import _metrics_handler

    return _metrics_handler


def called_by_periodiq() -> bool:
    """Return whether this thread runs periodiq's command, which has no hook for its start."""
    return any(frame.f_code is periodiq.main.__code__ for frame in _callers())


def imported_as_broker(module: str) -> bool:
    """Return whether dramatiq or periodiq now imports the module that its command line names as the broker.

    Neither passes the broker on: without ``:broker`` both take Dramatiq's global one, which the module has to set. Both
    import by the same function, in each worker process, however it was started. A module that the application's own
    modules import is not meant.
    """
    importing = [frame for frame in _callers() if frame.f_code is dramatiq.cli.import_broker.__code__]
    return any(str(frame.f_locals.get("value")).partition(":")[0] == module for frame in importing)


def _callers() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def call_defined_hooks_only(broker: Broker) -> None:
    """Let the broker skip hooks that do nothing; with two dozen middleware they cost as much as a message itself."""
    if type(broker).emit_before is Broker.emit_before and type(broker).emit_after is Broker.emit_after:
        hooks = _Hooks(broker)
        broker.emit_before = hooks.emit_before  # type: ignore[method-assign]
        broker.emit_after = hooks.emit_after  # type: ignore[method-assign]


class _Hooks:
    """Replacement for a broker's ``emit_before`` and ``emit_after``, which behave like Dramatiq's."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._middleware: list[Middleware] = []
        self._defined: dict[str, list[Middleware]] = {}  # by hook, in the order of the calls

    def emit_before(self, signal: str, *args: Any, **kwargs: Any) -> None:
        hook = f"before_{signal}"
        for middleware in self._that_define(hook):
            try:
                getattr(middleware, hook)(self._broker, *args, **kwargs)
            except MiddlewareError:
                raise
            except Exception:
                self._log(hook, middleware)

    def emit_after(self, signal: str, *args: Any, **kwargs: Any) -> None:
        hook = f"after_{signal}"
        for middleware in self._that_define(hook):
            try:
                getattr(middleware, hook)(self._broker, *args, **kwargs)
            except Exception:
                self._log(hook, middleware)

    def _that_define(self, hook: str) -> list[Middleware]:
        if self._middleware != self._broker.middleware:  # a worker adds its own at its start
            self._middleware, self._defined = list(self._broker.middleware), {}
        defined = self._defined.get(hook)
        if defined is None:
            inherited = getattr(Middleware, hook, None)
            defined = [
                each for each in self._middleware if getattr(getattr(each, hook), "__func__", None) is not inherited
            ]
            self._defined[hook] = defined if hook.startswith("before_") else defined[::-1]
        return self._defined[hook]

    def _log(self, hook: str, middleware: Middleware) -> None:
        self._broker.logger.critical("Unexpected failure in %s of %r.", hook, middleware, exc_info=True)


class Prefetch(Middleware):
    """Middleware that limits the messages a process takes from each queue to one per thread.

    Dramatiq takes two per thread. The second then waits behind the first one, which may be a sweep of many minutes,
    while another process is idle. From queues of delayed messages a process still takes many, because they keep no
    thread busy.

    Dramatiq's ``dramatiq_queue_prefetch`` in the environment wins.
    """

    def before_worker_boot(self, broker: Broker, worker: Worker) -> None:
        if not dramatiq.worker.QUEUE_PREFETCH:
            worker.queue_prefetch = worker.worker_threads
