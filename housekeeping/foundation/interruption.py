"""Ends what runs in another thread by an exception, and only there where it may be ended."""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Callable
from typing import Any, Final, TypeVar

from dramatiq.threading import Interrupt, raise_thread_exception

T = TypeVar("T")


class LostLease(Interrupt):
    """Raised in the thread of a run whose lease, or whose message, is no longer its own.

    Not an ``Exception``, so that an actor's ``except Exception`` does not pass over it.
    """

    def __str__(self) -> str:
        return "the run was interrupted: what it held is no longer its own"


class _Section:
    """What a thread is inside of while it may be interrupted."""

    def __init__(self) -> None:
        self.sent: type[Interrupt] | None = None


_lock: Final = threading.Lock()
_sections: Final[dict[int, _Section]] = {}  # by the thread that is inside


def interruptibly(function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    """Call a function that others may end with `interrupt`; no interrupt arrives after it has returned.

    Within another one in the same thread it is part of that.
    """
    thread_id = threading.get_ident()
    if thread_id in _sections:
        return function(*args, **kwargs)
    try:
        with _lock:
            _sections[thread_id] = _Section()
        return function(*args, **kwargs)
    finally:
        try:
            _leave(thread_id)
        finally:
            _leave(thread_id)  # the first one may itself have been interrupted half way


def interrupt(thread_id: int, kind: type[Interrupt]) -> bool:
    """Raise an exception in a thread that is inside of `interruptibly`; False when it is not, or has had one.

    Once is enough: a second one could come while the first is being dealt with.

    Note: It waits for a call into C to return: a statement, a sleep, a wait for another program.
    """
    with _lock:
        section = _sections.get(thread_id)
        if section is None or section.sent is not None:
            return False
        section.sent = kind
        raise_thread_exception(thread_id, kind)
        return True


def interrupter(kind: type[Interrupt]) -> Callable[[], bool]:
    """A function for others to `interrupt` the calling thread with."""
    return functools.partial(interrupt, threading.get_ident(), kind)


def retract(kind: type[Interrupt]) -> None:
    """Take back an interrupt of this kind that is still on its way to the calling thread."""
    thread_id = threading.get_ident()
    with _lock:
        section = _sections.get(thread_id)
        if section is not None and section.sent is kind:
            section.sent = None
            _take_back(thread_id)


def _leave(thread_id: int) -> None:
    with _lock:
        _sections.pop(thread_id, None)
        # One on its way to this thread must not arrive in what follows.
        _take_back(thread_id)


def _take_back(thread_id: int) -> None:
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread_id), None)
