"""Faults of the shutdown (promise R5)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import pytest
from dramatiq.threading import raise_thread_exception

from housekeeping.core import thread_interrupt
from housekeeping.core.errors import RedisUnavailable
from housekeeping.core.redis.client import retry_redis
from housekeeping.middleware import admission, reliable_enqueue, retries
from housekeeping.middleware.call_keys import UnusableArguments
from housekeeping.middleware.interrupts import statements, time_limit
from housekeeping.middleware.interrupts.shutdown import ShutdownNotifications
from housekeeping.middleware.telemetry.run_log import RunLog
from tests.twins import Twin
from tests.twins.planting import in_text, instead

_FOLDER: Final = "tests/integration/middleware/"
_FOLLOW_UPS: Final = f"{_FOLDER}test_follow_ups.py::"
_SHUTDOWN: Final = "tests/integration/middleware/interrupts/test_shutdown.py::"
_STATEMENTS: Final = "tests/integration/middleware/interrupts/test_statements.py::"


class _Never(Exception):
    """Error that is never raised."""


def _never_leave(patch: pytest.MonkeyPatch) -> None:
    def run(self: Any, inside: Any, function: Callable[[], Any]) -> Any:
        self._inside[inside.thread_id] = inside
        return function()

    patch.setattr(ShutdownNotifications, "_run", run)
    patch.setattr(thread_interrupt, "_leave", lambda thread_id: None)


def _treat_a_requeue_as_an_end(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(reliable_enqueue, "Requeue", _Never)
    patch.setattr(reliable_enqueue, "Shutdown", _Never)


def give_up_after_three_tries(patch: pytest.MonkeyPatch) -> None:
    """Give up on Redis after three tries, in stopping and in running workers."""

    def give_up(step: Any, **options: Any) -> Any:
        try:
            return retry_redis(step, **options)
        except RedisUnavailable as error:
            raise UnusableArguments(str(error)) from error

    patch.setattr(admission, "retry_redis", give_up)


TWINS: Final[list[Twin]] = [
    Twin(
        "R5",
        "treats_a_shutdown_as_a_failure",
        f"{_SHUTDOWN}test_actor_is_interrupted_after_the_grace_and_requeued",
        instead(retries, "Shutdown", _Never),
    ),
    Twin(
        "R5",
        "sends_on_failure_for_a_requeued_message",
        f"{_FOLLOW_UPS}test_requeued_message_sends_no_callback_yet",
        _treat_a_requeue_as_an_end,
    ),
    Twin(
        "R5",
        "interrupts_the_hooks_after_the_actor",
        f"{_SHUTDOWN}test_thread_in_its_after_hooks_is_never_interrupted",
        _never_leave,
    ),
    Twin(
        "R5",
        "raises_time_limits_anywhere",
        "tests/unit/middleware/test_time_limit.py::test_thread_outside_of_an_actor_is_not_interrupted",
        # An error that a test notices, unlike an interrupt.
        instead(time_limit, "interrupt", lambda thread_id, kind: raise_thread_exception(thread_id, AssertionError)),
    ),
    Twin(
        "R5",
        "forgets_the_outer_actor_of_a_nested_call",
        f"{_SHUTDOWN}test_actor_that_called_another_as_a_function_is_interrupted",
        instead(ShutdownNotifications, "_is_within", lambda self, thread_id: False),
        slow=True,
    ),
    Twin(
        "R5",
        "does_not_cancel_the_statement",
        f"{_STATEMENTS}test_actor_that_translates_the_cancellation_is_requeued_too",
        instead(statements, "_cancel", lambda connection: False),
        slow=True,
    ),
    Twin(
        "R5",
        "cancels_statements_outside_of_actors",
        f"{_STATEMENTS}test_only_statements_within_an_actor_are_canceled",
        in_text(statements, "_CANCEL", "pid = %(pid)s", "query LIKE 'DO %%pg_sleep%%'"),
    ),
    Twin(
        "R5",
        "cancels_a_commit",
        f"{_STATEMENTS}test_commit_is_not_canceled",
        in_text(statements, "_CANCEL", "(commit|end)", "nothing"),
    ),
    Twin(
        "R5",
        "sends_no_stop_signal_to_sweeps",
        "tests/acceptance/test_worker_process.py::test_stopped_sweep_resumes_from_its_cursor",
        instead(RunLog, "before_worker_shutdown", lambda self, broker, worker: None),
        in_processes=True,
        slow=True,
    ),
    Twin(
        "R5",
        "stops_retrying_redis_at_shutdown",
        "tests/acceptance/test_shutdown_without_redis.py"
        "::test_worker_that_cannot_release_a_key_stops_and_is_redelivered",
        give_up_after_three_tries,
        in_processes=True,
    ),
]
