"""Where another thread may be ended by an exception: not where a lock of the whole process would stay taken."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from types import FrameType
from typing import Any, Final

#: Functions that take or release a lock for whoever calls them, in Python's own modules. One that is interrupted leaves
#: the lock taken, and all threads wait for it for ever: before Python 3.13, that of a log handler among them.
_OF_LOCKS: Final = frozenset(
    {"__enter__", "__exit__", "acquire", "release"}
    | {"_acquire_restore", "_release_save"}  # of `threading.Condition`
    | {"_acquireLock", "_releaseLock"}  # of `logging`
)
#: Not in others: what they call `acquire` may wait for something else, and for as long as it likes.
_OWN: Final = frozenset({"asyncio", "concurrent", "logging", "multiprocessing", "queue", "threading"})
#: In the midst of their functions: the import system takes one, and a message on Dramatiq's log pipe that is broken off
#: makes all that follow it unreadable.
_NOT_WITHIN: Final = frozenset({"importlib._bootstrap", "importlib._bootstrap_external", "multiprocessing.connection"})


def at_safe_point(thread_id: int, outside: Mapping[str, Any]) -> bool:
    """Whether an exception raised in the thread right now leaves no lock behind that others wait for.

    True for a thread that is no more. The answer holds as long as the caller keeps the interpreter to itself: what it
    does next, it must do at once.

    Parameters:
      outside: The globals of a module; what the thread is inside of is looked at up to the first of its functions.
    """
    frame = sys._current_frames().get(thread_id)
    if frame is None or frame.f_globals is outside:
        return True
    if frame.f_code.co_name in _OF_LOCKS and _module(frame).partition(".")[0] in _OWN:
        return False
    while frame is not None and frame.f_globals is not outside:
        if _module(frame) in _NOT_WITHIN:
            return False
        frame = frame.f_back
    return True


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))
