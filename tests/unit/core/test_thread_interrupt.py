"""An interrupt reaches a thread only where it may be ended, once, and not after it was taken back."""

from __future__ import annotations

import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
from dramatiq.middleware import Shutdown

from housekeeping import ExclusiveLease
from housekeeping.testing.stubs import MemoryLeaseStore
from tests.faults import at_step
from tests.internals.core import (
    LostLease,
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
