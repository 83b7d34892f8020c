"""Interrupts: exceptions that one thread raises in another, only inside of functions that may be interrupted.

`run_interruptibly` marks such a function, `run_shielded` defers interrupts within it, and `interrupt` raises one.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable
from typing import Any, Final, TypeVar

from dramatiq.threading import Interrupt, raise_thread_exception

from housekeeping.core.cpython_threads import at_safe_point, replace_pending_exception

T = TypeVar("T")


class LostLease(Interrupt):
    """Raised in the thread of a run that no longer holds its lease or its message.

    Not an ``Exception``, so that an actor's ``except Exception`` does not catch it.
    """

    def __str__(self) -> str:
        return "the run was interrupted: it no longer holds its lease or its message"


class _Canceled(Interrupt):
    """Replaces an interrupt that is canceled, and is caught at once."""


class _Section:
    """State of a thread inside of `run_interruptibly`.

    Attributes:
      requested: The interrupt that another thread requested, if any.
      raised: Whether it was raised, and does not only wait for a safe point.
      received: Whether it has arrived in the thread.
      shielded: Whether the thread is inside of `run_shielded`.
    """

    def __init__(self) -> None:
        self.requested: type[Interrupt] | None = None
        self.raised = False
        self.received = False
        self.shielded = False


#: Pauses between attempts to interrupt a thread that is not at a safe point; doubled each time.
_FIRST_PAUSE_S: Final = 0.001
_LONGEST_PAUSE_S: Final = 0.05

#: Text of the error that Dramatiq raises in place of an interrupt if the actor's coroutine takes over a second to end.
_COROUTINE_CONTINUES: Final = "Timed out while waiting for coroutine."

_lock: Final = threading.Lock()
_sections: Final[dict[int, _Section]] = {}  # by thread id


def run_interruptibly(function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    """Call a function that other threads may `interrupt`; no interrupt arrives after it has returned.

    A nested call in the same thread is part of the outer one.
    """
    thread_id = threading.get_ident()
    section = _sections.get(thread_id)
    if section is not None and not section.shielded:
        return function(*args, **kwargs)
    end = _leave if section is None else functools.partial(_shield, section)
    try:
        if section is None:
            with _lock:
                section = _sections[thread_id] = _Section()
        elif (deferred := _unshield(section)) is not None:
            raise deferred()
        return function(*args, **kwargs)
    except Interrupt as raised:
        _note_arrival(section, raised)
        raise
    except RuntimeError as error:
        if isinstance(error.__cause__, Interrupt) and str(error) == _COROUTINE_CONTINUES:
            _note_arrival(section, error.__cause__)
            raise error.__cause__ from None
        raise
    finally:
        try:
            end(thread_id)
        finally:
            end(thread_id)  # an interrupt may have stopped the first call halfway


def run_shielded(function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    """Call a function and defer interrupts until it returns, except within `run_interruptibly` inside of it.

    Raises:
      Interrupt: After the function has returned, if an interrupt was deferred.
    """
    thread_id = threading.get_ident()
    section = _sections.get(thread_id)
    if section is None or section.shielded:
        return function(*args, **kwargs)
    _shield(section, thread_id)
    try:
        returned = function(*args, **kwargs)
    finally:
        deferred = _unshield(section)  # dropped if the function raised, because that ends the section as well
    if deferred is not None:
        raise deferred()
    return returned


def interrupt(thread_id: int, kind: type[Interrupt]) -> bool:
    """Raise an exception in a thread inside of `run_interruptibly`; False if it is not, or was interrupted before.

    A thread is interrupted once only, because a second exception could arrive while the first is handled.

    Note: The exception waits until a call into C returns: a statement, a sleep, a wait for another program. It also
      waits while the thread locks or unlocks a lock of Python's own modules, imports a module or writes to a pipe, see
      `cpython_threads`.
    """
    with _lock:
        section = _sections.get(thread_id)
        if section is None or section.requested is not None:
            return False
        section.requested, section.raised = kind, False
        if not section.shielded and not _raise(section, thread_id):
            threading.Thread(target=_raise_later, args=(section, thread_id), name="interrupt", daemon=True).start()
        return True


def _raise(section: _Section, thread_id: int) -> bool:
    """Raise the requested interrupt if the thread is at a safe point. Called with the lock held."""
    if not at_safe_point(thread_id, globals()):
        return False
    section.raised = True
    raise_thread_exception(thread_id, section.requested)
    return True


def _raise_later(section: _Section, thread_id: int) -> None:
    """Raise the requested interrupt at the next safe point, unless it has arrived or the thread has left by then."""
    pause_s = _FIRST_PAUSE_S
    while True:
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        with _lock:
            waiting = section.requested is not None and not section.raised and not section.received
            if not waiting or _sections.get(thread_id) is not section:
                return
            if not section.shielded and _raise(section, thread_id):
                return


def interrupter(kind: type[Interrupt]) -> Callable[[], bool]:
    """Return a function with which other threads `interrupt` the current one."""
    return functools.partial(interrupt, threading.get_ident(), kind)


def retract(kind: type[Interrupt]) -> None:
    """Cancel an interrupt of this kind that was requested for the current thread and has not arrived."""
    thread_id = threading.get_ident()
    with _lock:
        section = _sections.get(thread_id)
        if section is not None and section.requested is kind:
            _cancel(section, thread_id)
            section.requested, section.received = None, False


def _note_arrival(section: _Section | None, raised: Interrupt) -> None:
    if section is not None:
        section.received = section.received or type(raised) is section.requested


def _shield(section: _Section, thread_id: int) -> None:
    with _lock:
        section.shielded = True
        _cancel(section, thread_id)  # it stays `requested`, and is raised when the shield ends


def _unshield(section: _Section) -> type[Interrupt] | None:
    """End the shield and return the deferred interrupt, for the caller to raise."""
    with _lock:
        section.shielded = False
        deferred = None if section.received else section.requested
        section.received = section.requested is not None
        return deferred


def _leave(thread_id: int) -> None:
    with _lock:
        section = _sections.get(thread_id)
        if section is not None:
            # A pending interrupt must not arrive after the section.
            _cancel(section, thread_id)
            _sections.pop(thread_id, None)


def _cancel(section: _Section, thread_id: int) -> None:
    """Catch an interrupt that is pending for the current thread, by an exception that replaces it."""
    if section.requested is None or section.received:
        return
    try:
        replace_pending_exception(thread_id, _Canceled)
    except _Canceled:
        pass
