"""A time limit ends an actor's own function, once, and nothing else."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from dramatiq.middleware import TimeLimit, TimeLimitExceeded

from housekeeping.core.thread_interrupt import run_interruptibly, run_shielded
from housekeeping.middleware.interrupts.time_limit import within_actors

HERE = threading.get_ident


@pytest.fixture
def limits() -> Any:
    return within_actors(TimeLimit()).manager


def test_what_runs_for_too_long_is_interrupted(limits: Any) -> None:
    limits.add_timeout(HERE(), 0)

    with pytest.raises(TimeLimitExceeded):
        run_interruptibly(limits.interrupt_late)


def test_what_has_time_left_goes_on(limits: Any) -> None:
    limits.add_timeout(HERE(), 60_000)

    run_interruptibly(limits.interrupt_late)


def test_outside_of_an_actor_nothing_is_interrupted_and_the_next_one_is_not_either(limits: Any) -> None:
    limits.add_timeout(HERE(), 0)

    limits.interrupt_late()  # in a hook, or while a message is acknowledged

    run_interruptibly(limits.interrupt_late)


def test_a_message_that_has_ended_has_no_limit_any_more(limits: Any) -> None:
    limits.add_timeout(HERE(), 0)
    limits.remove_timeout(HERE())

    run_interruptibly(limits.interrupt_late)


def test_what_closes_a_run_comes_to_its_end(limits: Any) -> None:
    done: list[str] = []

    def closing() -> None:
        limits.interrupt_late()
        done.append("closed")

    limits.add_timeout(HERE(), 0)
    with pytest.raises(TimeLimitExceeded):
        run_interruptibly(lambda: run_shielded(closing))

    assert done == ["closed"]


def test_an_interval_stays_as_the_application_has_set_it() -> None:
    manager: Any = within_actors(TimeLimit(interval=250)).manager

    assert manager._interval_s == 0.25


def test_limits_that_are_ours_already_stay_as_they_are() -> None:
    # An application whose broker is put together twice, or that shares its middleware between two.
    limits = within_actors(TimeLimit())
    manager = limits.manager

    assert within_actors(limits).manager is manager
