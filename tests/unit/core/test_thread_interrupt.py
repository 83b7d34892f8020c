"""An interrupt reaches a thread only where it may be ended, once, and leaves no lock locked."""

from __future__ import annotations

import gc
import importlib
import logging
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, redirect_stderr, suppress
from datetime import timedelta
from io import StringIO
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from dramatiq.middleware import Shutdown
from dramatiq.threading import raise_thread_exception

from housekeeping import ExclusiveLease
from housekeeping.testing.stubs import MemoryLeaseStore
from tests.faults import at_step
from tests.internals.core import (
    LostLease,
    StderrHandler,
    interrupt,
    interrupter,
    retract,
    run_interruptibly,
    run_shielded,
    thread_interrupt,
)
from tests.internals.leases import lease

PATIENCE_S = 20
HERE = threading.get_ident


def endless() -> None:
    never = threading.Event()
    for _ in range(PATIENCE_S * 100):
        never.wait(0.01)


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The exceptions that would be raised in threads; none is raised."""
    noted: list[Any] = []
    monkeypatch.setattr(thread_interrupt, "raise_thread_exception", lambda thread_id, kind: noted.append(kind))
    return noted


def test_a_thread_is_interrupted_inside_only() -> None:
    told: list[bool] = []

    def work() -> None:
        with ThreadPoolExecutor(1) as another:
            another.submit(lambda: told.append(tell())).result(PATIENCE_S)
        endless()

    tell = interrupter(LostLease)
    told.append(tell())
    run_interruptibly(lambda: None)
    told.append(tell())
    with pytest.raises(LostLease):
        run_interruptibly(work)
    told.append(tell())

    assert told == [False, False, True, False]


def test_a_second_interrupt_is_not_sent(sent: list[Any]) -> None:
    # It could come while the first is being dealt with.
    answers = run_interruptibly(lambda: [interrupt(HERE(), Shutdown), interrupt(HERE(), LostLease)])

    assert (answers, sent) == ([True, False], [Shutdown])


def test_nested_section_belongs_to_the_outer_one(sent: list[Any]) -> None:
    def inner() -> bool:
        return run_interruptibly(lambda: True)

    assert run_interruptibly(lambda: [inner(), interrupt(HERE(), LostLease)]) == [True, True]


def test_retracted_interrupt_allows_another_kind(sent: list[Any]) -> None:
    taken_back: list[int] = []

    def work() -> list[bool]:
        interrupt(HERE(), LostLease)
        retract(Shutdown)
        assert taken_back == []
        retract(LostLease)
        assert taken_back == [HERE()]
        return [interrupt(HERE(), Shutdown)]

    with at_step(thread_interrupt, "replace_pending_exception", "before", lambda: taken_back.append(HERE())):
        assert run_interruptibly(work) == [True]
    assert sent == [LostLease, Shutdown]


def test_lease_without_interrupting_retracts_no_interrupt(sent: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    # An application's own lease within an actor that has one: the actor's interrupt may be on its way.
    retracted: list[Any] = []
    monkeypatch.setattr(lease, "retract", retracted.append)

    with ExclusiveLease("k", timedelta(minutes=1), MemoryLeaseStore()):
        pass
    interrupting = ExclusiveLease("k", timedelta(minutes=1), MemoryLeaseStore())
    interrupting.try_obtain()
    interrupting.start_renewal(interrupting=True)
    interrupting.cancel()

    assert retracted == [LostLease]


def test_interrupt_of_a_shielded_function_arrives_after_it() -> None:
    done: list[str] = []

    def ending() -> None:
        assert interrupt(HERE(), LostLease) is True
        done.extend(str(number) for number in range(1000))

    def run() -> None:
        run_shielded(ending)
        done.append("beyond")

    with pytest.raises(LostLease):
        run_interruptibly(run)

    assert done == [str(number) for number in range(1000)]


def test_section_in_a_shielded_function_can_be_interrupted_once() -> None:
    done: list[str] = []

    def told_endlessly(another: ThreadPoolExecutor) -> None:
        another.submit(interrupter(LostLease))
        endless()

    def run() -> str:
        try:
            with ThreadPoolExecutor(1) as another:
                run_interruptibly(told_endlessly, another)
        except LostLease:
            assert interrupt(HERE(), Shutdown) is False  # once is enough
            done.append("ended")
        return "returned"

    assert run_interruptibly(lambda: run_shielded(run)) == "returned"
    assert done == ["ended"]


def test_deferred_interrupt_is_raised_in_an_inner_section() -> None:
    def run() -> None:
        assert interrupt(HERE(), LostLease) is True
        with pytest.raises(LostLease):
            run_interruptibly(endless)

    run_interruptibly(lambda: run_shielded(run))


def test_exception_in_a_shielded_function_is_not_replaced() -> None:
    def failing() -> None:
        interrupt(HERE(), LostLease)
        raise ValueError

    with pytest.raises(ValueError):
        run_interruptibly(lambda: run_shielded(failing))


def test_interrupt_of_a_traced_thread_does_not_hang() -> None:
    # CPython 3.11 may make it run for ever: under a debugger, or where coverage is measured.
    def told_endlessly() -> None:
        interrupt(HERE(), LostLease)
        endless()

    def told_before_it_returns() -> str:
        interrupt(HERE(), LostLease)
        return "told"

    before = sys.gettrace()
    with pytest.raises(LostLease):
        run_interruptibly(told_endlessly)
    sys.settrace(lambda frame, event, argument: None)
    try:
        assert run_interruptibly(lambda: "left") == "left"
        with pytest.raises(LostLease):
            run_interruptibly(lambda: run_shielded(told_before_it_returns))
    finally:
        sys.settrace(before)


class Told(threading.Thread):
    """Does something endlessly inside of `run_interruptibly`, until it is interrupted."""

    def __init__(self, step: Callable[[], object]) -> None:
        super().__init__(daemon=True)
        self.interrupted = False
        self._step = step

    def run(self) -> None:
        try:
            run_interruptibly(self._endlessly)
        except LostLease:
            self.interrupted = True

    def _endlessly(self) -> None:
        while True:
            self._step()
            time.sleep(0.001)  # where it may be interrupted

    def waits_in(self, *functions: str) -> bool:
        """Whether the thread is inside one of these functions now."""
        assert self.ident is not None
        frame = thread_interrupt.frame_of(self.ident)
        return frame is not None and frame.f_code.co_name in functions


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def is_free(lock: Any) -> bool:
    taken: bool = lock.acquire(timeout=1)
    if taken:
        lock.release()
    return taken


def told_while_it_waits(step: Callable[[], object], lock: AbstractContextManager[Any], *functions: str) -> Told:
    """A thread that was interrupted while it waited for a lock that it then got, in one of these functions."""
    told = Told(step)
    with lock:
        told.start()
        until(lambda: told.waits_in(*functions))
        assert interrupt(told.ident or 0, LostLease) is True
    told.join(PATIENCE_S)
    assert not told.is_alive()
    return told


def fill(pipe: Connection) -> None:
    """Write messages until there is no room for another."""
    os.set_blocking(pipe.fileno(), False)
    with suppress(BlockingIOError):
        while True:
            pipe.send_bytes(b"x")
    os.set_blocking(pipe.fileno(), True)


@pytest.fixture
def handler() -> Iterator[logging.Handler]:
    """Of the logger ``locked``, and of Python's own."""
    own = logging.StreamHandler(StringIO())
    logging.getLogger("locked").addHandler(own)
    yield own
    logging.getLogger("locked").removeHandler(own)


@pytest.fixture
def looks() -> Iterator[list[None]]:
    """One item for each time it was asked whether a thread can be interrupted now."""
    asked: list[None] = []
    with at_step(thread_interrupt, "at_safe_point", "before", lambda: asked.append(None)):
        yield asked


def test_interrupt_of_a_thread_waiting_for_a_lock_leaves_it_unlocked() -> None:
    lock = threading.Lock()
    condition = threading.Condition(lock)

    def step() -> None:
        with condition:
            pass

    assert told_while_it_waits(step, lock, "__enter__").interrupted
    assert is_free(lock)


def test_acquire_function_of_another_library_is_interrupted() -> None:
    # As redis-py's lock does, which asks again and again.
    def acquire() -> None:
        while True:
            time.sleep(0.001)

    told = Told(acquire)
    told.start()
    until(lambda: told.waits_in("acquire"))
    assert interrupt(told.ident or 0, LostLease) is True
    told.join(PATIENCE_S)

    assert told.interrupted


def test_interrupt_of_a_logging_thread_leaves_the_handler_unlocked(
    handler: logging.Handler,
) -> None:
    lock: Any = handler.lock
    step = lambda: logging.getLogger("locked").warning("a line")  # noqa: E731

    # From Python 3.13 on it waits in `handle`, where a lock cannot be left behind.
    assert told_while_it_waits(step, lock, "acquire", "handle").interrupted
    assert is_free(lock)


def test_exception_raised_by_others_leaves_the_stderr_handler_unlocked() -> None:
    # `TimeLimit` of an application's own broker, a debugger, another library: they look at nothing before.
    own: Any = StderrHandler()
    told = Told(lambda: own.write(["a line"]))
    with redirect_stderr(StringIO()):
        with own.lock:
            told.start()
            until(lambda: told.waits_in("write"))
            raise_thread_exception(told.ident or 0, LostLease)
        told.join(PATIENCE_S)

    assert (told.interrupted, is_free(own.lock)) == (True, True)


def test_interrupt_waits_until_a_log_line_is_written(looks: list[None]) -> None:
    own: Any = StderrHandler()
    told = Told(lambda: own.write(["a line"]))
    with redirect_stderr(StringIO()) as written:
        with own.lock:
            told.start()
            until(lambda: told.waits_in("write"))
            assert interrupt(told.ident or 0, LostLease) is True
            until(lambda: len(looks) > 1)
        told.join(PATIENCE_S)

    assert told.interrupted
    assert written.getvalue().startswith("a line\n")


def test_interrupt_waits_until_a_message_is_written_to_a_pipe(looks: list[None]) -> None:
    # Dramatiq's workers log through one; a long line is written in two steps.
    reading, writing = Pipe(duplex=False)
    with reading, writing:
        fill(writing)
        line = b"x" * 20_000
        told = Told(lambda: writing.send_bytes(line))
        told.start()
        until(lambda: told.waits_in("_send"))
        assert interrupt(told.ident or 0, LostLease) is True
        until(lambda: len(looks) > 2)
        read = []
        while told.is_alive() or reading.poll():
            if reading.poll(0.05):
                read.append(reading.recv_bytes())

        assert (told.interrupted, set(read)) == (True, {b"x", line})


def test_interrupt_waits_until_an_import_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, looks: list[None]
) -> None:
    (tmp_path / "slow_to_import.py").write_text(
        "import import_events\n"
        "import_events.begins.set()\n"
        "while not import_events.may_end.wait(0.001): pass\n"
        "done = True\n"
    )
    begins, may_end = threading.Event(), threading.Event()
    events: Any = SimpleNamespace(begins=begins, may_end=may_end)
    monkeypatch.setitem(sys.modules, "import_events", events)
    monkeypatch.syspath_prepend(tmp_path)
    told = Told(lambda: importlib.import_module("slow_to_import"))

    told.start()
    assert begins.wait(PATIENCE_S)
    assert interrupt(told.ident or 0, LostLease) is True
    until(lambda: len(looks) > 2)
    may_end.set()
    told.join(PATIENCE_S)

    assert told.interrupted
    assert sys.modules.pop("slow_to_import").done


def test_delayed_interrupt_arrives_at_the_next_safe_point(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[int] = []

    def at_the_third_look(thread_id: int, outside: object) -> bool:
        looked.append(thread_id)
        return len(looked) == 3

    monkeypatch.setattr(thread_interrupt, "at_safe_point", at_the_third_look)
    told = Told(lambda: time.sleep(0.001))
    told.start()
    until(lambda: interrupt(told.ident or 0, LostLease))
    told.join(PATIENCE_S)

    assert (told.interrupted, looked) == (True, [told.ident] * 3)


def test_delayed_interrupt_does_not_arrive_after_its_section(monkeypatch: pytest.MonkeyPatch) -> None:
    waiting = threading.Event()

    def never(thread_id: int, outside: object) -> bool:
        waiting.set()
        return False

    monkeypatch.setattr(thread_interrupt, "at_safe_point", never)
    before = set(threading.enumerate())

    def section() -> str:
        assert interrupt(threading.get_ident(), LostLease) is True
        assert waiting.wait(PATIENCE_S)
        return "left"

    assert run_interruptibly(section) == "left"
    monkeypatch.setattr(thread_interrupt, "at_safe_point", lambda thread_id, outside: True)
    until(lambda: set(threading.enumerate()) <= before)  # the thread that looks again has given up
    assert run_interruptibly(lambda: "shielded") == "shielded"


def test_interrupt_before_a_with_block_leaves_the_lock_unlocked() -> None:
    # From Python 3.14 on, an exception can arrive there.
    lock = threading.Lock()

    def enter() -> None:
        with lock:
            pass

    assert told_while_it_waits(enter, lock, "enter").interrupted
    assert is_free(lock)


class Freed:
    """Object whose destructor waits until it may go on."""

    def __init__(self, begins: threading.Event, may_end: threading.Event) -> None:
        self.begins, self.may_end, self.ended = begins, may_end, threading.Event()

    def __del__(self) -> None:
        self.begins.set()
        wait_for(self.may_end)
        self.ended.set()


def wait_for(event: threading.Event) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not event.is_set() and time.monotonic() < deadline:
        time.sleep(0.001)


def test_interrupt_waits_until_a_destructor_has_ended(looks: list[None]) -> None:
    begins, may_end = threading.Event(), threading.Event()
    held = [Freed(begins, may_end)]
    ended = held[0].ended
    told = Told(lambda: held.clear())

    told.start()
    assert begins.wait(PATIENCE_S)
    assert interrupt(told.ident or 0, LostLease) is True
    until(lambda: len(looks) > 2)
    may_end.set()
    told.join(PATIENCE_S)

    assert (told.interrupted, ended.is_set()) == (True, True)


def freed_by_a_weak_reference(callback: Callable[[], object]) -> list[object]:
    freed: set[None] = set()
    reference = weakref.ref(freed, lambda _: callback())
    return [freed, reference]


def freed_as_a_generator(callback: Callable[[], object]) -> list[object]:
    def generate() -> Iterator[None]:
        try:
            yield
        finally:
            callback()

    generator = generate()
    next(generator)
    return [generator]


@pytest.mark.parametrize("freed", [freed_by_a_weak_reference, freed_as_a_generator])
def test_interrupt_that_python_ignores_is_raised_again(freed: Callable[[Callable[[], object]], list[object]]) -> None:
    begins, may_end = threading.Event(), threading.Event()

    def callback() -> None:
        begins.set()
        wait_for(may_end)

    held = freed(callback)
    told = Told(lambda: held.__delitem__(slice(1)))

    told.start()
    assert begins.wait(PATIENCE_S)
    assert interrupt(told.ident or 0, LostLease) is True
    told.join(PATIENCE_S)

    assert (told.interrupted, may_end.is_set()) == (True, False)


def test_interrupt_ignored_during_garbage_collection_is_raised_again() -> None:
    begins = threading.Event()

    def callback(phase: str, info: object) -> None:
        if threading.current_thread() is told:
            begins.set()
            wait_for(threading.Event())

    told = Told(lambda: begins.is_set() or gc.collect())
    gc.callbacks.append(callback)
    try:
        told.start()
        assert begins.wait(PATIENCE_S)
        gc.callbacks.remove(callback)
        assert interrupt(told.ident or 0, LostLease) is True
        told.join(PATIENCE_S)
    finally:
        gc.callbacks[:] = [each for each in gc.callbacks if each is not callback]

    assert told.interrupted


def test_exceptions_that_python_ignores_are_reported_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    reported: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda ignored: reported.append(ignored.exc_type))

    def interrupted() -> None:
        interrupt(threading.get_ident(), LostLease)
        raise LostLease

    with pytest.raises(LostLease):
        run_interruptibly(interrupted)
    held = freed_by_a_weak_reference(lambda: 1 // 0)
    del held[0]

    assert reported == [ZeroDivisionError]


@pytest.mark.parametrize("collects", [True, False])
def test_no_garbage_is_collected_while_frames_are_read(collects: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    # With CPython 3.11 it could wait for the list of threads, which is locked then, and the process would stop.
    seen: list[bool] = []
    read, before = sys._current_frames, gc.isenabled()
    monkeypatch.setattr(sys, "_current_frames", lambda: seen.append(gc.isenabled()) or read())  # type: ignore[func-returns-value]
    try:
        gc.enable() if collects else gc.disable()
        frame = thread_interrupt.frame_of(threading.get_ident())
        left = gc.isenabled()
    finally:
        gc.enable() if before else gc.disable()

    assert (seen, frame is None, left) == ([False], False, collects)
