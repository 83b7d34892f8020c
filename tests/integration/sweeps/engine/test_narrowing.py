"""Overrides that operators set during a run apply to its next batch."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

import pytest

from housekeeping import Sweep
from housekeeping.testing.stubs import ManualClock
from tests.declarations import changed
from tests.integration.conftest import AddStatuses
from tests.integration.sweeps.engine.sizing import DUE, SMALL, Sizes
from tests.internals.core import SYSTEM_CLOCK, RunBudget
from tests.internals.database import Database
from tests.internals.engine import Speed, ThrottleWatch, run_sweep
from tests.internals.ledger import Counts, Override, resume, switch
from tests.internals.sweeps import Backlog, Batch, BatchResult, StagePlan
from tests.internals.workers import BUILT_IN

NAME = SMALL.name


def said(*, after: int, say: Callable[[], Any], then: Callable[[Counts], None] = lambda counts: None) -> Any:
    """Operator who sets an override once, after this many rows."""
    told: list[int] = []

    def on_batch(counts: Counts) -> None:
        then(counts)
        if counts["deleted_rows"] >= after and not told:
            told.append(after)
            say()

    return on_batch


def test_forced_run_ignores_a_pause_set_during_it(add_statuses: AddStatuses) -> None:
    add_statuses(50, DUE)

    result = run_sweep(SMALL, force=True, on_batch=said(after=10, say=lambda: switch(Override(NAME, "paused"))))

    assert (result.outcome, result.counts["deleted_rows"]) == ("done", 50)


def test_forced_run_of_a_disabled_worker_is_narrowed_as_well(add_statuses: AddStatuses) -> None:
    add_statuses(8, DUE)
    switch(Override(NAME, "narrow", batch_size=3))
    sizes = Sizes()

    result = run_sweep(changed(SMALL, enabled=False), force=True, on_batch=sizes)

    assert (result.outcome, sizes.seen) == ("done", [3, 3, 2])


def test_expired_pause_or_pause_of_another_worker_is_ignored(add_statuses: AddStatuses) -> None:
    add_statuses(30, DUE)

    def others() -> None:
        switch(Override("another", "paused"))
        switch(Override(NAME, "paused", until=datetime.fromisoformat("2026-01-01T00:00:00+00:00")))

    assert run_sweep(SMALL, on_batch=said(after=10, say=others)).outcome == "done"


def test_narrowed_run_takes_smaller_batches_until_the_override_ends(add_statuses: AddStatuses) -> None:
    add_statuses(60, DUE)
    sizes = Sizes()
    narrow = said(after=10, say=lambda: switch(Override(NAME, "narrow", batch_size=3)), then=sizes)
    wide = said(after=26, say=lambda: resume(NAME))

    def on_batch(counts: Counts) -> None:
        narrow(counts)
        wide(counts)

    result = run_sweep(SMALL, on_batch=on_batch)

    # What was said during the first batch is heard with the second, and holds from the third.
    assert sizes.seen[:2] == [10, 10]
    assert sizes.seen[2:5] == [3, 3, 3] and sizes.seen[5:7] == [10, 10]
    assert (result.outcome, sum(sizes.seen)) == ("done", 60)


@pytest.mark.parametrize(("asked", "given"), [(4, [4, 4, 4]), (10, [10, 2]), (1000, [10, 2])])
def test_narrowed_batch_size_never_exceeds_the_workers_own(
    add_statuses: AddStatuses, asked: int, given: list[int]
) -> None:
    add_statuses(12, DUE)
    switch(Override(NAME, "narrow", batch_size=asked))
    sizes = Sizes()

    run_sweep(SMALL, on_batch=sizes)

    assert [size for size in sizes.seen if size] == given


def test_narrowed_time_limit_applies_to_a_running_run(add_statuses: AddStatuses) -> None:
    add_statuses(100, DUE)
    second = ManualClock(tick=timedelta(seconds=1))
    short = Override(NAME, "narrow", max_runtime_s=3)

    result = run_sweep(SMALL, clock=second, on_batch=said(after=10, say=lambda: switch(short)))

    # One look at the clock a batch: the fourth is over 3 s.
    assert (result.outcome, result.reason, result.counts["deleted_rows"]) == ("partial", "out_of_time", 40)


def test_narrowing_never_extends_the_time_limit(add_statuses: AddStatuses) -> None:
    add_statuses(100, DUE)
    second = ManualClock(tick=timedelta(seconds=1))
    switch(Override(NAME, "narrow", max_runtime_s=3600))

    result = run_sweep(changed(SMALL, runtime=timedelta(seconds=3)), clock=second)

    assert (result.reason, result.counts["deleted_rows"]) == ("out_of_time", 40)


@dataclass
class Outside:
    """A page of effects outside of the database. After each one, it checks whether the run should continue."""

    effects: list[int] = field(default_factory=list)
    between: Callable[[int], object] = lambda number: None
    name: str = "outside"
    batch_size: int = 10
    counts: tuple[str, ...] = ("effects", "batches")
    progress_counts: tuple[str, ...] = ()

    def prepare(self, batch: Batch) -> bool:
        for number in range(10):
            if batch.time_is_up():
                return False
            self.effects.append(number)
            self.between(number)
        return True

    def apply(self, batch: Batch, prepared: bool) -> BatchResult:
        return BatchResult(position=(1,), exhausted=prepared)

    def after_commit(self, batch: Batch, result: BatchResult) -> None:
        """Nothing."""

    def backlog(self, now: datetime, limit: int, argument: Any = None) -> Backlog:
        return Backlog(0)

    def oldest(self, now: datetime, argument: Any = None) -> Any:
        return None

    def plan(self, now: datetime, limit: int, argument: Any = None) -> StagePlan:
        return StagePlan(self.name, Backlog(0), {})


@pytest.mark.parametrize("sweep", [sweep for family in BUILT_IN for sweep in family.SWEEPS], ids=lambda each: each.name)
def test_every_built_in_stage_can_take_smaller_batches(postgres: Database, sweep: Sweep) -> None:
    passes = sweep.stages_for_run()
    budget = RunBudget(sweep.limits.runtime, SYSTEM_CLOCK)
    pace = Speed(sweep, passes, budget, SYSTEM_CLOCK, ThrottleWatch(sweep.limits.throttle, [], budget, time.sleep))
    own = [each.batch_size for each in passes]

    pace.apply(Override(sweep.name, "narrow", batch_size=2))
    narrow = [pace.next_stage(place).batch_size for place in range(len(passes))]
    pace.apply(None)
    wide = [pace.next_stage(place).batch_size for place in range(len(passes))]
    pace.apply(Override(sweep.name, "narrow", batch_size=2))
    once_more = [pace.next_stage(place).batch_size for place in range(len(passes))]

    assert narrow == [min(2, size) for size in own]
    assert wide == own
    assert once_more == narrow
