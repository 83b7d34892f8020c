"""Internals of CPython with which one thread raises an exception in another; no other module uses them.

An exception in the wrong place would leave a lock of the whole process locked, so `sys._current_frames` shows first
what the thread is executing. ``PyThreadState_SetAsyncExc`` raises the exception, or replaces one that has not arrived
yet. Dramatiq's ``raise_thread_exception`` uses it as well.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Mapping
from types import FrameType
from typing import Any, Final

#: Functions of Python's own modules that lock or unlock a lock for their caller. If one is interrupted, the lock stays
#: locked and all threads wait for it forever: before Python 3.13, a log handler's lock, too.
_LOCKING: Final = frozenset(
    {"__enter__", "__exit__", "acquire", "release"}
    | {"_acquire_restore", "_release_save"}  # of `threading.Condition`
    | {"_acquireLock", "_releaseLock"}  # of `logging`
)
#: Only in these packages: elsewhere a function named `acquire` can wait for anything, and for any length of time.
_STANDARD_LIBRARY: Final = frozenset({"asyncio", "concurrent", "logging", "multiprocessing", "queue", "threading"})
#: Modules with no safe point at all. The import system holds a lock. A message on Dramatiq's log pipe that is cut off
#: makes all later ones unreadable.
_NEVER_SAFE: Final = frozenset({"importlib._bootstrap", "importlib._bootstrap_external", "multiprocessing.connection"})
#: Iterations of a loop until an exception set for the current thread has been raised; one is enough.
_ITERATIONS: Final = 1000


def at_safe_point(thread_id: int, outside: Mapping[str, Any]) -> bool:
    """Return whether an exception can be raised in the thread now without leaving a shared lock locked.

    True for a thread that has ended. The answer is valid only until another thread runs, so act on it at once.

    Parameters:
      outside: Globals of the module that called the interruptible function. Its frame and those below are not checked.
    """
    frame = sys._current_frames().get(thread_id)
    if frame is None or frame.f_globals is outside:
        return True
    if frame.f_code.co_name in _LOCKING and _module(frame).partition(".")[0] in _STANDARD_LIBRARY:
        return False
    while frame is not None and frame.f_globals is not outside:
        if _module(frame) in _NEVER_SAFE:
            return False
        frame = frame.f_back
    return True


def replace_pending_exception(thread_id: int, kind: type[BaseException]) -> None:
    """Raise an exception in the current thread, in place of a pending one that another thread has set."""
    # Setting NULL would cancel the pending one, but makes CPython 3.11 loop forever in a traced thread.
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread_id), ctypes.py_object(kind))
    for _ in range(_ITERATIONS):
        pass


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))
