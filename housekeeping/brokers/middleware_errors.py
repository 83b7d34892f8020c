"""Exceptions that decide what happens to a message; Dramatiq gives meaning to their types.

``SkipMessage`` (Dramatiq's own) drops a message, and any other ``MiddlewareError`` fails it. No other exception may
leave a ``before_`` hook, because Dramatiq logs it *and runs the actor anyway*.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

from dramatiq.errors import Retry
from dramatiq.middleware import MiddlewareError, SkipMessage

from housekeeping.core.errors import DeclarationError, RedisUnavailable
from housekeeping.core.logs import typed_error_line
from housekeeping.core.redis import translate_redis_errors


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
