"""Interrupts: exceptions that one thread raises in another, only inside of functions that may be interrupted.

`run_interruptibly` marks such a function, `run_shielded` defers interrupts within it, and `interrupt` raises one.
`exit_on` ends a process by a signal, also where Python ignores the first exception.

Internals of CPython are used here and in no other module. An exception in the wrong place would leave a lock of the
whole process locked, or be ignored by the interpreter, so `sys._current_frames` shows first what the thread is
executing. ``PyThreadState_SetAsyncExc`` raises the exception, or replaces one that has not arrived yet. Dramatiq's
``raise_thread_exception`` uses it as well. The exception arrives at the instruction that the thread executes, if that
one looks for it: a call, a jump back, the start of a function. Other instructions leave it to the next one that looks.
"""

from __future__ import annotations

import _thread
import ctypes
import functools
import gc
import opcode
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from types import FrameType
from typing import Any, Final, TypeVar

from dramatiq.threading import Interrupt, raise_thread_exception

from housekeeping.core.threads import free_after_fork

#: Functions of Python's own modules that lock or unlock a lock for their caller. If one is interrupted, the lock stays
#: locked and all threads wait for it forever: before Python 3.13, a log handler's lock, too.
_LOCKING: Final = frozenset(
    {"__enter__", "__exit__", "acquire", "release"}
    | {"_acquire_restore", "_release_save"}  # of `threading.Condition`
    | {"_acquireLock", "_releaseLock"}  # of `logging`
)
#: Only in these packages: elsewhere a function named `acquire` can wait for anything, and for any length of time.
_STANDARD_LIBRARY: Final = frozenset({"asyncio", "concurrent", "logging", "multiprocessing", "queue", "threading"})
#: Modules with no safe point at all, nor in what they call. The import system holds a lock. A message on Dramatiq's log
#: pipe that is cut off makes all later ones unreadable. The interpreter ignores exceptions of weakref's callbacks.
_NEVER_SAFE: Final = frozenset(
    {"importlib._bootstrap", "importlib._bootstrap_external", "multiprocessing.connection", "weakref", "_weakrefset"}
)
#: Packages and modules that hold a lock, or a connection that threads share, from one statement to the next. They are
#: safe only where they wait (`_WAITS`), and in what the application has them call.
_GUARDED: Final = (
    "contextlib",
    "dramatiq.brokers",
    "dramatiq.middleware",
    "dramatiq.rate_limits.backends",
    "housekeeping.core.logs",
    "housekeeping.core.redis_internals",
    "housekeeping.core.telemetry",
    "housekeeping.database",
    "housekeeping.leases.renewal",
    "logging",
    "opentelemetry.sdk",
    "peewee",
    "pika",
    "playhouse",
    "prometheus_client",
    "psycopg2.pool",
    "redis",
    "sentry_sdk",
    "structlog",
)
#: Parts of them that share nothing, and whose functions can wait for any length of time.
_NOT_GUARDED: Final = ("redis.lock", "sentry_sdk.integrations")
#: Functions of guarded packages that wait for a server or a file within a ``try`` or ``with``, and clean up if that
#: fails. Threads that do nothing else would otherwise never be interrupted: while another thread looks, they wait.
_WAITS: Final = frozenset(
    {
        ("housekeeping.core.logs", "_write"),
        ("housekeeping.database.connection", "fetch_at_once"),
        ("logging", "emit"),
        ("logging", "flush"),
        ("peewee", "_execute_cursor"),
        ("pika.adapters.select_connection", "poll"),
        ("redis._parsers.hiredis", "read_from_socket"),
        ("redis._parsers.socket", "_read_from_socket"),
        ("redis.connection", "send_packed_command"),
        ("redis.retry", "call_with_retry"),
    }
)
#: Ends of a transaction and the like: what such a function has done may not be undone by the block that it begins.
_BLOCK_ENDS: Final = frozenset({"__enter__", "__exit__"})
#: Instructions at which an exception arrives that another thread has set.
_LOOKING: Final = frozenset(
    opcode.opmap[name]
    for name in ("CALL", "CALL_FUNCTION_EX", "CALL_KW", "JUMP_BACKWARD", "RESUME")
    if name in opcode.opmap
)
#: From Python 3.14 on, the instruction before the call that enters a ``with`` block. The exception arrives after the
#: call and before the block, so what was entered, such as a lock, is never left (CPython's issue 148874).
_LOAD_SPECIAL: Final = opcode.opmap.get("LOAD_SPECIAL")
#: Iterations of a loop until an exception set for the current thread has been raised; one is enough.
_ITERATIONS: Final = 1000
_reading_frames: Final = free_after_fork(threading.Lock())


def at_safe_point(thread_id: int, outside: Mapping[str, Any]) -> bool:
    """Return whether an exception can be raised in the thread now without leaving a lock locked or being ignored.

    True for a thread that has ended. The answer is valid only until another thread runs, so act on it at once.

    Parameters:
      outside: Globals of the module that called the interruptible function. Its frame and those below are not checked.
    """
    frame = frame_of(thread_id)
    if frame is None:
        return True
    if _enters_block(frame):
        return False
    frames = list(_frames(frame, outside))
    if any(each.f_code.co_name == "__del__" or _module(each) in _NEVER_SAFE for each in frames):
        return False
    return not frames or (_is_safe_in_threading(frames[0]) and _is_safe_for_libraries(frames))


def frame_of(thread_id: int) -> FrameType | None:
    """Return the frame that a thread is executing. None for a thread that has ended."""
    # CPython 3.11 locks its list of threads for this call. A garbage collection during it may wait for that lock, which
    # is a deadlock (CPython's issue 106883).
    with _reading_frames:
        collects = gc.isenabled()
        gc.disable()
        try:
            return sys._current_frames().get(thread_id)
        finally:
            if collects:
                gc.enable()


def innermost_frame(thread_id: int) -> str | None:
    """Return where a thread is now: file, line and function. None for a thread that has ended."""
    frame = frame_of(thread_id)
    if frame is None:
        return None
    code = frame.f_code
    return f"{'/'.join(code.co_filename.split(os.sep)[-2:])}:{frame.f_lineno} {code.co_qualname}"


def replace_pending_exception(thread_id: int, kind: type[BaseException]) -> None:
    """Raise an exception in the current thread, in place of a pending one that another thread has set."""
    # Setting NULL would cancel the pending one, but makes CPython 3.11 loop forever in a traced thread.
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread_id), ctypes.py_object(kind))
    for _ in range(_ITERATIONS):
        pass


def _frames(frame: FrameType | None, outside: Mapping[str, Any]) -> Iterator[FrameType]:
    while frame is not None and frame.f_globals is not outside:
        yield frame
        frame = frame.f_back


def _enters_block(frame: FrameType) -> bool:
    """Return whether the exception would arrive between entering a ``with`` block and its first statement."""
    code = frame.f_code.co_code if _LOAD_SPECIAL is not None else b""
    for position in range(frame.f_lasti, len(code), 2):
        if code[position] in _LOOKING:
            return code[position - 2] == _LOAD_SPECIAL
    return False


def _is_safe_in_threading(frame: FrameType) -> bool:
    name, package = frame.f_code.co_name, _module(frame).partition(".")[0]
    if package == "threading" and name == "wait":
        return _is_protected(frame)  # before its ``try``, `Condition.wait` has unlocked the lock of its caller
    return name not in _LOCKING or package not in _STANDARD_LIBRARY


def _is_safe_for_libraries(frames: list[FrameType]) -> bool:
    """Return whether no guarded package is between two statements, given the frames from the innermost one on."""
    waits = False
    for frame in frames:
        module = _module(frame)
        if not _is_guarded(module):
            if module.partition(".")[0] in sys.stdlib_module_names:
                continue  # it is as safe as its caller
            return True  # the application's own code, also where a library calls it: it may raise anything there
        name = frame.f_code.co_name
        if not waits and not ((module, name) in _WAITS and _is_protected(frame)):
            return False
        waits = True
        if name in _BLOCK_ENDS:
            return False
    return True


def _is_guarded(module: str) -> bool:
    return _is_part(module, _GUARDED) and not _is_part(module, _NOT_GUARDED)


def _is_part(module: str, packages: tuple[str, ...]) -> bool:
    return any(module == each or module.startswith(f"{each}.") for each in packages)


def _is_protected(frame: FrameType) -> bool:
    """Return whether the frame's current instruction is within a ``try`` or ``with``."""
    numbers = list(_numbers(frame.f_code.co_exceptiontable))
    # Of each range: start, length, handler, depth.
    ranges = zip(numbers[::4], numbers[1::4], strict=True)
    return any(start <= frame.f_lasti // 2 < start + length for start, length in ranges)


def _numbers(exception_table: bytes) -> Iterator[int]:
    """Return the numbers of the table. Each byte has six bits of one, and a seventh if more follow."""
    number = 0
    for byte in exception_table:
        number = number << 6 | byte & 63
        if not byte & 64:
            yield number
            number = 0


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


#: An orderly end takes less than this in most cases, and a supervisor waits ten seconds and more.
_AGAIN_S: Final = 2.0


def exit_on(*numbers: int) -> Callable[[], None]:
    """Raise SystemExit(0) in the main thread on these signals, repeatedly until the returned function is called.

    Python ignores an exception that a signal's handler raises within a destructor, so once is not enough.
    """
    main, ended, repeating = threading.main_thread(), threading.Event(), threading.Event()

    def repeat(number: int) -> None:
        while not ended.wait(_AGAIN_S) and main.ident is not None:
            signal.pthread_kill(main.ident, number)

    def stop(number: int, frame: FrameType | None) -> None:
        if ended.is_set():
            return
        if not repeating.is_set():
            repeating.set()
            # `Thread.start` takes a lock, which the interrupted code may hold.
            _thread.start_new_thread(repeat, (number,))
        raise SystemExit(0)

    for number in numbers:
        signal.signal(number, stop)
    return ended.set


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
      raised: Whether it was raised, and does not only wait for a safe point. False again if the interpreter ignored it.
      received: Whether it has arrived in the thread.
      shielded: Whether the thread is inside of `run_shielded`.
    """

    def __init__(self) -> None:
        self.requested: type[Interrupt] | None = None
        self.raised = False
        self.received = False
        self.shielded = False


#: Pause between looks at a thread that is not at a safe point. Short, because a thread that only computes can be in the
#: same library at most looks.
_PAUSE_S: Final = 0.005
#: Pause between looks at a thread whose interrupt was raised, until it has received it.
_LONG_PAUSE_S: Final = 0.05

#: Text of the error that Dramatiq raises in place of an interrupt if the actor's coroutine takes over a second to end.
_COROUTINE_CONTINUES: Final = "Timed out while waiting for coroutine."

_lock: Final = free_after_fork(threading.Lock())
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

    A thread is interrupted once only, because a second exception could arrive while the first is handled. An exception
    that the interpreter ignores, because it arrived in a destructor, is raised again.

    Note: The exception waits until a call into C returns: a statement, a sleep, a wait for another program. It also
      waits while the thread locks or unlocks a lock, enters a ``with`` block, runs a destructor, imports a module,
      writes to a pipe, or is between two steps of a library that other threads use as well.
    """
    with _lock:
        section = _sections.get(thread_id)
        if section is None or section.requested is not None:
            return False
        _notice_ignored()
        section.requested, section.raised = kind, False
        _raise(section, thread_id)
        watch = threading.Thread(target=_raise_until_received, args=(section, thread_id), name="interrupt", daemon=True)
        watch.start()
        return True


def _raise(section: _Section, thread_id: int) -> None:
    """Raise the requested interrupt if the thread is at a safe point. Called with the lock held."""
    if not section.raised and not section.shielded and at_safe_point(thread_id, globals()):
        section.raised = True
        raise_thread_exception(thread_id, section.requested)


def _raise_until_received(section: _Section, thread_id: int) -> None:
    """Raise the requested interrupt at the next safe point, again if it is ignored, until the thread has left."""
    while True:
        time.sleep(_LONG_PAUSE_S if section.raised else _PAUSE_S)
        with _lock:
            if section.requested is None or section.received or _sections.get(thread_id) is not section:
                return
            _raise(section, thread_id)


def _notice_ignored() -> None:
    """Have interrupts raised again that Python ignores: in destructors and callbacks of the garbage collector."""
    report = sys.unraisablehook
    if isinstance(report, _IgnoredExceptions):
        return
    sys.unraisablehook = _IgnoredExceptions(report)


class _IgnoredExceptions:
    """Hook for exceptions that Python ignores. It runs in the thread that they arrived in.

    Parameters:
      report: The hook that it replaces.
    """

    def __init__(self, report: Callable[[sys.UnraisableHookArgs], Any]) -> None:
        self._report = report

    def __call__(self, ignored: sys.UnraisableHookArgs) -> None:
        section = _sections.get(threading.get_ident())
        if section is not None and ignored.exc_type is section.requested:
            section.raised = False  # without the lock, which this thread may hold
        elif ignored.exc_type is not _Canceled:
            self._report(ignored)


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
