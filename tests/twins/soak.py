"""Faults that grow with the number of messages. Each is a soak of its own.

They are planted in the hooks that every message passes, so that one fault is in as few lines as a real one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import pytest
from dramatiq import Message, MessageProxy, Middleware

from tests.internals.middleware import RunLog
from tests.twins import Twin

_TESTS: Final = "tests/soak/test_soak.py::"
AnyMessage = Message[Any] | MessageProxy
_kept: Final[list[Any]] = []


def _twin(promise: str, test: str, breaks: Callable[[pytest.MonkeyPatch], None]) -> Twin:
    return Twin(promise, breaks.__name__.removeprefix("_"), _TESTS + test, breaks, in_processes=True)


def _besides(patch: pytest.MonkeyPatch, middleware: type[Middleware], does: Callable[[AnyMessage], object]) -> None:
    """Make a middleware do something else after each message."""
    hook = middleware.after_process_message

    def process(self: Any, broker: Any, message: MessageProxy, **how: Any) -> None:
        hook(self, broker, message, **how)
        does(message)

    patch.setattr(middleware, "after_process_message", process)


def _remembers_every_message_id(patch: pytest.MonkeyPatch) -> None:
    _besides(patch, RunLog, lambda message: _kept.append(message.message_id))


TWINS: Final = [
    _twin("D10", "test_no_object_is_kept_per_message", _remembers_every_message_id),
]
