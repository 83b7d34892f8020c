"""Time limits that interrupt an actor's own function once."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from dramatiq.middleware import TimeLimit, TimeLimitExceeded

from tests.internals.core import run_interruptibly, run_shielded
from tests.internals.middleware import within_actors

HERE = threading.get_ident


@pytest.fixture
def limits() -> Any:
    return within_actors(TimeLimit()).manager


def test_actor_over_its_limit_is_interrupted(limits: Any) -> None:
    limits.add_timeout(HERE(), 0)

    with pytest.raises(TimeLimitExceeded):
        run_interruptibly(limits.interrupt_late)


def test_actor_within_its_limit_is_not_interrupted(limits: Any) -> None:
    limits.add_timeout(HERE(), 60_000)

    run_interruptibly(limits.interrupt_late)


def test_thread_outside_of_an_actor_is_not_interrupted(limits: Any) -> None:
    limits.add_timeout(HERE(), 0)

    limits.interrupt_late()  # in a hook, or while a message is acknowledged

    run_interruptibly(limits.interrupt_late)


def test_ended_message_has_no_limit(limits: Any) -> None:
    limits.add_timeout(HERE(), 0)
    limits.remove_timeout(HERE())

    run_interruptibly(limits.interrupt_late)


def test_cleanup_after_a_run_is_not_interrupted(limits: Any) -> None:
    done: list[str] = []

    def closing() -> None:
        limits.interrupt_late()
        done.append("closed")

    limits.add_timeout(HERE(), 0)
    with pytest.raises(TimeLimitExceeded):
        run_interruptibly(lambda: run_shielded(closing))

    assert done == ["closed"]


def test_interval_set_by_the_application_is_kept() -> None:
    manager: Any = within_actors(TimeLimit(interval=250)).manager

    assert manager._interval_s == 0.25


def test_installed_limits_are_left_unchanged() -> None:
    # For example an application that installs twice, or two brokers that share their middleware.
    limits = within_actors(TimeLimit())
    manager = limits.manager

    assert within_actors(limits).manager is manager
