"""Results of messages that were delivered more than once."""

from __future__ import annotations

import functools
import sys
from typing import TypeVar

from dramatiq import Broker, MessageProxy, Middleware
from dramatiq.results import ResultFailure, ResultMissing, Results

from housekeeping.core.middleware_errors import SkipDelivery

M = TypeVar("M", bound=Middleware)


def kept_results(given: M) -> M:
    """Let a skipped delivery leave the result of its message alone; middleware other than `Results` stays as it is.

    Dramatiq stores None as the result of a skipped message. It would replace the result of a message that is delivered
    again, or answer those who wait for a retry.
    """
    if isinstance(given, Results):
        results, hook = given, given.after_skip_message

        @functools.wraps(hook)
        def run_hook(broker: Broker, message: MessageProxy) -> None:
            # Dramatiq calls this hook while it handles the SkipMessage, and does not pass it on.
            skip = sys.exception()
            if not isinstance(skip, SkipDelivery) or _is_done_by_another(results, message, skip):
                hook(broker, message)

        given.after_skip_message = run_hook  # type: ignore[method-assign]
    return given


def _is_done_by_another(results: Results, message: MessageProxy, skip: SkipDelivery) -> bool:
    """Return whether another message with the same idempotency key did the work, so that this one has no result."""
    if skip.reason != "already_done" or "idempotency_key" not in message.options:
        return False
    try:
        results.backend.get_result(message)
    except ResultMissing:
        return True
    except ResultFailure:
        return False
    return False
