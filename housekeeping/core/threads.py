"""Blocking calls of coroutines, in threads of the event loop, and locks that forked children can use."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextvars import ContextVar, copy_context
from typing import TYPE_CHECKING, Any, Final, ParamSpec, TypeVar

if TYPE_CHECKING:
    import asyncio

L = TypeVar("L")
P = ParamSpec("P")
T = TypeVar("T")


def free_after_fork(lock: L) -> L:
    """Return a lock of the process, and let it be free in each forked child; the thread that held it is not there."""
    own: Any = lock
    os.register_at_fork(after_in_child=own._at_fork_reinit)
    return lock


#: Set once the task that waits for the current call of `in_thread` is canceled. None outside of such calls.
task_canceled: Final[ContextVar[threading.Event | None]] = ContextVar("task_canceled", default=None)


async def in_thread(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call a blocking function in a thread of the event loop's pool, with the context variables of the task.

    ::

        await housekeeping.in_thread(notify.send, order_id)
        result = await housekeeping.in_thread(housekeeping.run_sweep, expired_sessions)

    A thread cannot be canceled. So a task that is canceled waits until the function has ended, and raises
    `asyncio.CancelledError` then: no call continues behind the back of its caller. `run_sweep` notices it, and ends
    after its batch with the reason ``shutdown``. If the event loop is stopped instead, the function still ends.

    Raises:
      asyncio.CancelledError: The task was canceled. The function may have had its effect; its error is dropped.
      Exception: What the function raises. StopIteration becomes RuntimeError, as in a coroutine.
    """
    import asyncio  # commands that need only the locks would import it for nothing

    canceled = threading.Event()
    context = copy_context()
    context.run(task_canceled.set, canceled)

    def call() -> T:
        try:
            return context.run(function, *args, **kwargs)
        except StopIteration as error:  # a future does not take it, and would never be done
            raise RuntimeError(f"{function} raised StopIteration") from error

    # A plain future: `asyncio.to_thread` as a task would be canceled by the end of `asyncio.run`.
    future = asyncio.get_running_loop().run_in_executor(None, call)
    reason: asyncio.CancelledError | None = None
    while not future.done():
        try:
            await asyncio.wait([future])
        except asyncio.CancelledError as error:
            reason = error
            canceled.set()
    if reason is not None:
        future.exception()  # otherwise the event loop logs it as never retrieved
        raise reason
    return future.result()
