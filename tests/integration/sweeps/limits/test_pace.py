"""Pace: rows per second, and rests between batches."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import pytest

from housekeeping import Sweep, Throttle
from housekeeping.testing.stubs import ManualClock
from tests.declarations import changed
from tests.integration.conftest import AddStatuses, Plant
from tests.integration.sweeps.engine.sizing import DUE, SMALL, Impatient, Sizes
from tests.internals.core import WorkerSettings
from tests.internals.database import database
from tests.internals.engine import run_sweep
from tests.internals.ledger import Counts, Override, Run, resume, switch

#: Batches of ten rows, in a run of at most ten minutes, without other throttles.
LONG = changed(SMALL, runtime=timedelta(minutes=10), throttle=Throttle(None, None))


def paced(sweep: Sweep = LONG, **settings: float) -> Sweep:
    return sweep.configured(WorkerSettings(**settings))  # type: ignore[arg-type]


def test_run_keeps_to_its_rows_per_second(add_statuses: AddStatuses, clock: ManualClock) -> None:
    add_statuses(95, DUE)
    stopping, sizes = Impatient(clock), Sizes()

    result = run_sweep(paced(max_rows_per_s=20.0), clock=clock, stopping=stopping, on_batch=sizes)

    assert (result.outcome, sizes.seen) == ("done", [*[10] * 9, 5])
    assert stopping.waits == [0.5] * 9, "the last batch is followed by nothing"
    assert result.duration_s == pytest.approx(4.5)


@pytest.mark.parametrize(("own", "narrowed", "wait_s"), [(None, 20.0, 0.5), (20.0, 40.0, 0.5), (40.0, 20.0, 0.5)])
def test_narrowed_rows_per_s_apply_unless_the_worker_has_fewer(
    add_statuses: AddStatuses, clock: ManualClock, own: float | None, narrowed: float, wait_s: float
) -> None:
    add_statuses(25, DUE)
    switch(Override(LONG.name, "narrow", rows_per_s=narrowed))
    stopping = Impatient(clock)

    run_sweep(LONG if own is None else paced(max_rows_per_s=own), clock=clock, stopping=stopping)

    assert stopping.waits == pytest.approx([wait_s, wait_s])


def test_rows_per_s_narrowed_during_a_run_end_with_the_override(add_statuses: AddStatuses, clock: ManualClock) -> None:
    add_statuses(60, DUE)
    stopping, batches = Impatient(clock), list[int]()

    def operate(counts: Counts) -> None:
        batches.append(counts["deleted_rows"])
        if len(batches) == 1:
            switch(Override(LONG.name, "narrow", rows_per_s=20.0))
        if len(batches) == 4:
            resume(LONG.name)

    run_sweep(LONG, clock=clock, stopping=stopping, on_batch=operate)

    # What was said during a batch is heard with the next one.
    assert stopping.waits == pytest.approx([0.5, 0.5])


def test_time_of_a_batch_counts_toward_its_rows(add_statuses: AddStatuses, clock: ManualClock) -> None:
    add_statuses(25, DUE)
    stopping, seconds = Impatient(clock), iter([0.3, 0.7, 0.0])

    def take(counts: Counts) -> None:
        clock.advance(timedelta(seconds=next(seconds)))

    run_sweep(paced(max_rows_per_s=20.0), clock=clock, stopping=stopping, on_batch=take)

    assert stopping.waits == [pytest.approx(0.2)]


def test_batch_has_at_most_the_rows_of_one_second(add_statuses: AddStatuses, clock: ManualClock) -> None:
    add_statuses(7, DUE)
    stopping, sizes = Impatient(clock), Sizes()

    run_sweep(paced(max_rows_per_s=3.5), clock=clock, stopping=stopping, on_batch=sizes)

    assert sizes.seen == [3, 3, 1]
    assert stopping.waits == pytest.approx([3 / 3.5, 3 / 3.5])


def test_rows_that_fail_count_toward_the_rows_per_second(
    add_statuses: AddStatuses, clock: ManualClock, plant: Plant
) -> None:
    add_statuses(20, DUE)
    plant("DELETE ON user_statuses", "OLD.user_id <= 4", "RAISE EXCEPTION 'not this one'")
    stopping = Impatient(clock)

    result = run_sweep(paced(max_rows_per_s=20.0), clock=clock, stopping=stopping)

    assert (result.counts["deleted_rows"], result.counts["failed"]) == (16, 4)
    assert stopping.waits == [0.5, 0.5]


def test_run_rests_a_multiple_of_each_batch_between_transactions(add_statuses: AddStatuses, clock: ManualClock) -> None:
    add_statuses(25, DUE)
    seconds, idle = iter([0.2, 0.4, 0.0]), list[bool]()

    class Watching(Impatient):
        def wait(self, timeout: float | None = None) -> bool:
            idle.append(not database.in_transaction())
            return super().wait(timeout)

    stopping = Watching(clock)

    def take(counts: Counts) -> None:
        clock.advance(timedelta(seconds=next(seconds)))

    run_sweep(paced(rest=1.5), clock=clock, stopping=stopping, on_batch=take)

    assert stopping.waits == pytest.approx([0.3, 0.6])
    assert idle == [True, True]


def test_run_ends_instead_of_waiting_beyond_its_time_limit(
    add_statuses: AddStatuses, clock: ManualClock, last_run: Callable[[], Run]
) -> None:
    add_statuses(100, DUE)
    stopping = Impatient(clock)
    short = changed(LONG, runtime=timedelta(seconds=25))

    first = run_sweep(paced(short, max_rows_per_s=0.1), clock=clock, stopping=stopping)

    assert (first.outcome, first.reason, first.counts["deleted_rows"]) == ("partial", "out_of_time", 3)
    assert (last_run().outcome, first.counts["out_of_time"]) == ("partial", True)
    assert sum(stopping.waits) == pytest.approx(20), "the third wait would end after 30 s"


def test_first_batch_is_processed_whatever_the_pace(add_statuses: AddStatuses, clock: ManualClock) -> None:
    add_statuses(3, DUE)
    short = changed(LONG, runtime=timedelta(seconds=1))

    result = run_sweep(paced(short, max_rows_per_s=0.001), clock=clock, stopping=Impatient(clock))

    assert (result.outcome, result.reason, result.counts["deleted_rows"]) == ("partial", "out_of_time", 1)


def test_shutdown_ends_a_wait(add_statuses: AddStatuses, clock: ManualClock) -> None:
    add_statuses(100, DUE)

    class Stopped(Impatient):
        def wait(self, timeout: float | None = None) -> bool:
            self.set()
            return super().wait(timeout)

    stopping = Stopped(clock)

    result = run_sweep(paced(rest=100.0, max_rows_per_s=1.0), clock=clock, stopping=stopping)

    assert (result.outcome, result.reason, len(stopping.waits)) == ("partial", "shutdown", 1)


def test_wait_ends_when_the_clock_stands_still(add_statuses: AddStatuses, clock: ManualClock) -> None:
    add_statuses(24, DUE)

    class Standing(Impatient):
        def wait(self, timeout: float | None = None) -> bool:
            assert timeout is not None
            self.waits.append(timeout)
            if len(self.waits) > 9:
                self.set()
            return self.is_set()

    stopping = Standing(clock)

    run_sweep(paced(LONG, max_rows_per_s=5.0), clock=clock, stopping=stopping)

    assert stopping.waits == [1.0] * 4


def test_settings_replace_the_fields_of_the_sweep() -> None:
    declared = changed(LONG, rows_per_s=100.0, rest=1.0)

    assert declared.configured(WorkerSettings()) == declared
    configured = declared.configured(WorkerSettings(max_rows_per_s=None, rest=0.5))
    assert (configured.limits.rows_per_s, configured.limits.rest) == (None, 0.5)
