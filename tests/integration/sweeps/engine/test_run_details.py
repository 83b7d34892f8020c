"""Process and error in the ledger row of a run."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable

import pytest
from dramatiq.middleware import Shutdown

from tests.declarations import changed
from tests.integration.conftest import AddStatuses
from tests.internals.engine import run_sweep, stored_traceback
from tests.internals.ledger import Counts, Run, history, runs
from tests.internals.workers import status_sweep as sweep

DUE = "now() - interval '1 hour'"


def fail(counts: Counts) -> None:
    raise OSError("no route to redis://user:hunter2@cache/0")


def test_run_and_skipped_tick_name_their_process(add_statuses: AddStatuses) -> None:
    add_statuses(1, DUE)
    run_sweep(sweep)
    runs.record(sweep.name, "skipped", "paused", message_id=None, tick=None, trigger="schedule")

    found = [(each.host, each.pid) for each in history.recent(sweep.name, 5)]

    assert found == [(socket.gethostname(), os.getpid())] * 2


def test_failed_run_has_a_traceback_without_passwords(add_statuses: AddStatuses, last_run: Callable[[], Run]) -> None:
    add_statuses(2, DUE)
    run_sweep(changed(sweep, batch=1), on_batch=fail)

    text = history.failures_of(last_run().id).traceback

    assert text is not None and text.startswith("Traceback (most recent call last):")
    assert text.rstrip().endswith("OSError: no route to redis://user:***@cache/0") and ", in fail\n" in text


def test_shutdown_has_no_traceback() -> None:
    assert (stored_traceback(Shutdown()), stored_traceback(None)) == (None, None)


@pytest.mark.parametrize("text", ["x" * 1_000_000, "\0" * 1_000_000, "password=" + "s" * 60_000], ids=len)
def test_stored_traceback_is_bounded_and_storable(text: str) -> None:
    try:
        raise ValueError(text)
    except ValueError as error:
        stored = stored_traceback(error)

    assert stored is not None and len(stored) <= 10_000 and "\0" not in stored and "sss" not in stored


def test_traceback_of_a_deep_recursion_has_the_innermost_frames() -> None:
    def even(left: int) -> int:
        return odd(left - 1) + 1 if left else 1 // 0

    def odd(left: int) -> int:
        return even(left - 1) + 1

    with pytest.raises(ZeroDivisionError) as raised:
        even(500)

    stored = stored_traceback(raised.value)

    assert stored is not None and stored.count("  File ") == 30
    assert stored.rstrip().endswith(f"ZeroDivisionError: {raised.value}")
