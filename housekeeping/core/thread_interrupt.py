"""Ends what runs in another thread by an exception, and only there where it may be ended."""

from __future__ import annotations

import ctypes
import functools
import threading
import time
from collections.abc import Callable
from typing import Any, Final, TypeVar

from dramatiq.threading import Interrupt, raise_thread_exception

from housekeeping.core.safe_points import at_safe_point

T = TypeVar("T")


class LostLease(Interrupt):
    """Raised in the thread of a run whose lease, or whose message, is no longer its own.

    Not an ``Exception``, so that an actor's ``except Exception`` does not pass over it.
    """

    def __str__(self) -> str:
        return "the run was interrupted: what it held is no longer its own"


class _TakenBack(Interrupt):
    """Takes the place of an interrupt that is taken back, and ends there."""


class _Section:
    """What a thread is inside of while it may be interrupted.

    Attributes:
      sent: What it has been told to end by; null: nothing.
      raised: That this is on its way, and not only waiting for a point where the thread may be ended.
      heard: That this was raised in it.
      shut: That it is `run_shielded` now.
    """

    def __init__(self) -> None:
        self.sent: type[Interrupt] | None = None
        self.raised = False
        self.heard = False
        self.shut = False


#: Turns of a loop until an exception that this very thread was sent has arrived: it needs one.
_AT_LATEST: Final = 1000
#: How long to wait before another look at a thread that could not be interrupted; each time longer, up to a limit.
_FIRST_PAUSE_S: Final = 0.001
_LONGEST_PAUSE_S: Final = 0.05

_lock: Final = threading.Lock()
_sections: Final[dict[int, _Section]] = {}  # by the thread that is inside


def run_interruptibly(function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    """Call a function that others may end with `interrupt`; no interrupt arrives after it has returned.

    Within another one in the same thread it is part of that.
    """
    thread_id = threading.get_ident()
    section = _sections.get(thread_id)
    if section is not None:
        return _disturbed(section, thread_id, function, *args, **kwargs) if section.shut else function(*args, **kwargs)
    try:
        with _lock:
            section = _sections[thread_id] = _Section()
        return function(*args, **kwargs)
    except Interrupt as raised:
        _hear(section, raised)
        raise
    finally:
        try:
            _leave(thread_id)
        finally:
            _leave(thread_id)  # the first one may itself have been interrupted half way


def run_shielded(function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    """Call a function to its end: an interrupt is held back until then, but within an `run_interruptibly` inside of it.

    Raises:
      Interrupt: After the function has returned, when one was held back.
    """
    thread_id = threading.get_ident()
    section = _sections.get(thread_id)
    if section is None or section.shut:
        return function(*args, **kwargs)
    _shut(section, thread_id)
    try:
        returned = function(*args, **kwargs)
    finally:
        kind = _open(section)  # beside an exception it is not raised: that one ends the section as well
    if kind is not None:
        raise kind()
    return returned


def _disturbed(section: _Section, thread_id: int, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    try:
        kind = _open(section)
        if kind is not None:
            raise kind()
        return function(*args, **kwargs)
    except Interrupt as raised:
        _hear(section, raised)
        raise
    finally:
        try:
            _shut(section, thread_id)
        finally:
            _shut(section, thread_id)  # as in `run_interruptibly`


def interrupt(thread_id: int, kind: type[Interrupt]) -> bool:
    """Raise an exception in a thread that is inside of `run_interruptibly`; False when it is not, or has had one.

    Once is enough: a second one could come while the first is being dealt with.

    Note: It waits for a call into C to return: a statement, a sleep, a wait for another program. It also
      waits while the thread takes or releases a lock of Python's own modules, imports something or writes to a
      pipe, see `safe_points`.
    """
    with _lock:
        section = _sections.get(thread_id)
        if section is None or section.sent is not None:
            return False
        section.sent, section.raised = kind, False
        if not section.shut and not _raise(section, thread_id):
            threading.Thread(target=_raise_later, args=(section, thread_id), name="interrupt", daemon=True).start()
        return True


def _raise(section: _Section, thread_id: int) -> bool:
    """Raise what was sent, if the thread is where it may be; with the lock held."""
    if not at_safe_point(thread_id, globals()):
        return False
    section.raised = True
    raise_thread_exception(thread_id, section.sent)
    return True


def _raise_later(section: _Section, thread_id: int) -> None:
    """Raise what was sent once the thread is where it may be, unless it has left, or has heard of it, by then."""
    pause_s = _FIRST_PAUSE_S
    while True:
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        with _lock:
            waits = section.sent is not None and not section.raised and not section.heard
            if not waits or _sections.get(thread_id) is not section:
                return
            if not section.shut and _raise(section, thread_id):
                return


def interrupter(kind: type[Interrupt]) -> Callable[[], bool]:
    """A function for others to `interrupt` the calling thread with."""
    return functools.partial(interrupt, threading.get_ident(), kind)


def retract(kind: type[Interrupt]) -> None:
    """Take back an interrupt of this kind that is still on its way to the calling thread."""
    thread_id = threading.get_ident()
    with _lock:
        section = _sections.get(thread_id)
        if section is not None and section.sent is kind:
            _take_back(section, thread_id)
            section.sent, section.heard = None, False


def _hear(section: _Section | None, raised: Interrupt) -> None:
    if section is not None:
        section.heard = section.heard or type(raised) is section.sent


def _shut(section: _Section, thread_id: int) -> None:
    with _lock:
        section.shut = True
        _take_back(section, thread_id)  # one on its way stays `sent`, and is raised once the section is open


def _open(section: _Section) -> type[Interrupt] | None:
    """Let interrupts in again; returns what was held back, for the caller to raise."""
    with _lock:
        section.shut = False
        kind = None if section.heard else section.sent
        section.heard = section.sent is not None
        return kind


def _leave(thread_id: int) -> None:
    with _lock:
        section = _sections.get(thread_id)
        if section is not None:
            # One on its way to this thread must not arrive in what follows.
            _take_back(section, thread_id)
            _sections.pop(thread_id, None)


def _take_back(section: _Section, thread_id: int) -> None:
    """Catch what is on its way to the calling thread, by another exception that takes its place."""
    if section.sent is None or section.heard:
        return
    try:
        # Not null, which cancels as well: it makes CPython 3.11 run a traced thread round for ever.
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread_id), ctypes.py_object(_TakenBack))
        for _ in range(_AT_LATEST):
            pass
    except _TakenBack:
        pass
