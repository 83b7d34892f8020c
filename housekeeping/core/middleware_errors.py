"""What is raised to steer a message rather than to report an error; Dramatiq gives meaning to the types.

``SkipMessage`` (Dramatiq's own) drops a message, any other ``MiddlewareError`` fails it; nothing
else may leave a ``before_`` hook, because Dramatiq logs it *and runs the actor all the same*.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

from dramatiq.errors import Retry
from dramatiq.middleware import MiddlewareError, SkipMessage

from housekeeping.core.errors import DeclarationError, RedisUnavailable
from housekeeping.core.redis_client import translate_redis_errors
from housekeeping.core.sanitize import typed_error_line


class SkipEnqueue(MiddlewareError):
    """Keeps a message from being enqueued; its sender gets the message back as if it had been.

    Attributes:
      reason: Why, as the ledger and the logs say it.
      duplicate_of: The id of the message that stands for it; null when none does.
    """

    def __init__(self, reason: str, duplicate_of: str | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.duplicate_of = duplicate_of


class Skip(SkipMessage):
    """Drops a message instead of running it.

    Attributes:
      reason: Why, as the ledger and the logs say it.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class Requeue(MiddlewareError, Retry):
    """Puts the message back into its queue without using up a retry.

    Parameters:
      after: How long it waits there; not at all unless said.
    """

    def __init__(self, reason: str, after: timedelta = timedelta()) -> None:
        super().__init__(reason)
        self.delay = int(after.total_seconds() * 1000)


class InvalidOption(DeclarationError, MiddlewareError):
    """An actor was declared with an option that cannot work; the text shows the right form."""


class StoreUnavailable(MiddlewareError):
    """Redis did not answer, so the message fails and is retried: nothing runs unprotected."""


class GuardUnavailable(MiddlewareError):
    """What protects a run could not be had, for a reason that is not Redis; the message fails and is retried."""


@contextmanager
def fail_message_on_error() -> Iterator[None]:
    """Let an error fail the message, where Dramatiq would log it and go on without protection.

    Raises:
      StoreUnavailable: In place of `RedisUnavailable` and of redis-py's errors.
      GuardUnavailable: In place of any other that Dramatiq would pass over.
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
