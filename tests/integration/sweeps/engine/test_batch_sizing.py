"""Batches that adapt to the time they take."""

from __future__ import annotations

from datetime import timedelta

import pytest

from housekeeping.testing.stubs import ManualClock
from tests.declarations import changed
from tests.integration.conftest import AddStatuses
from tests.integration.sweeps.engine.sizing import DUE, SMALL, WELL, Impatient, Sizes, Told
from tests.internals.core import SettingsError, WorkerSettings
from tests.internals.engine import DbHealth, run_sweep
from tests.internals.ledger import Counts, Override, switch
from tests.internals.workers import uploads_sweep as uploads

TARGET = changed(SMALL, batch=100, batch_takes=timedelta(seconds=1), runtime=timedelta(hours=1))


class Slow(Sizes):
    """Lets time pass in each batch, in order; the last length from then on."""

    def __init__(self, clock: ManualClock, *seconds: float) -> None:
        super().__init__()
        self._clock = clock
        self._seconds = list(seconds)

    def __call__(self, counts: Counts) -> None:
        super().__call__(counts)
        seconds = self._seconds.pop(0) if len(self._seconds) > 1 else self._seconds[0]
        self._clock.advance(timedelta(seconds=seconds))


def test_slow_batches_are_halved_down_to_a_tenth(add_statuses: AddStatuses, clock: ManualClock) -> None:
    add_statuses(250, DUE)
    slow = Slow(clock, 1.001)

    run_sweep(TARGET, clock=clock, on_batch=slow)

    assert slow.seen[:7] == [100, 50, 25, 12, 10, 10, 10]


def test_fast_batches_grow_by_a_tenth_up_to_their_own_size(add_statuses: AddStatuses, clock: ManualClock) -> None:
    add_statuses(1000, DUE)
    slow = Slow(clock, 2, 2, 1, 0.5)

    run_sweep(TARGET, clock=clock, on_batch=slow)

    # Exactly the target is in time.
    assert slow.seen[:11] == [100, 50, 25, 35, 45, 55, 65, 75, 85, 95, 100]
    assert max(slow.seen) == 100


def test_small_batch_shrinks_to_one_row_and_grows_by_one(add_statuses: AddStatuses, clock: ManualClock) -> None:
    add_statuses(17, DUE)
    slow = Slow(clock, 2, 2, 2, 0)

    run_sweep(changed(TARGET, batch=5), clock=clock, on_batch=slow)

    assert slow.seen == [5, 2, 1, 1, 2, 3, 3]


def test_narrowed_batch_size_limits_adaptive_batches(add_statuses: AddStatuses, clock: ManualClock) -> None:
    add_statuses(120, DUE)
    switch(Override(SMALL.name, "narrow", batch_size=30))
    slow = Slow(clock, 2, 2, 0)

    run_sweep(TARGET, clock=clock, on_batch=slow)

    assert slow.seen[:4] == [30, 30, 25, 30]


def test_throttle_halves_an_adaptive_batch(add_statuses: AddStatuses, clock: ManualClock) -> None:
    add_statuses(300, DUE)
    slow = Slow(clock, 2, 0)  # the second batch ends when the next look is due
    lagging = Told(WELL, DbHealth(99.0, 0, False))
    in_time = changed(TARGET, batch_takes=timedelta(seconds=10))

    run_sweep(in_time, clock=clock, on_batch=slow, health=lagging, stopping=Impatient(clock))

    assert slow.seen[:3] == [100, 100, 50]


def test_worker_with_fixed_batches_rejects_a_target() -> None:
    with pytest.raises(SettingsError, match=r'"target_batch_s"\] is 1.0, but this worker has no use for it'):
        uploads.configured(WorkerSettings(target_batch_s=1.0))


def test_target_batch_time_is_set_by_a_setting() -> None:
    assert SMALL.configured(WorkerSettings(target_batch_s=0.5)).limits.batch_takes == timedelta(seconds=0.5)
    assert TARGET.configured(WorkerSettings(target_batch_s=None)).limits.batch_takes is None
