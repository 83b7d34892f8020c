"""The breaker that is set to limit runs: a flood is processed in portions, each with an alert."""

from __future__ import annotations

import dataclasses
from datetime import timedelta

import pytest

from housekeeping import Sweep
from housekeeping.testing.stubs import ManualClock
from housekeeping.workers.user_status_cleanup.models import UserStatus
from tests.declarations import changed
from tests.integration.conftest import AddStatuses, Plant
from tests.integration.sweeps.conftest import History
from tests.integration.sweeps.engine.sizing import DUE, SMALL, Sizes, past_runs
from tests.integration.sweeps.limits.test_breaker_alert import alerts
from tests.integration.sweeps.orders import Order, Outside, add
from tests.integration.sweeps.orders import sweep as orders_sweep
from tests.internals.database import Database
from tests.internals.engine import run_sweep
from tests.internals.ledger import Counts
from tests.internals.sweeps import Stage, TableStage
from tests.internals.workers import status_sweep as sweep

LIMITED = changed(SMALL, guard_action="limit")


def test_flood_is_deleted_in_two_runs(add_statuses: AddStatuses, history: History, clock: ManualClock) -> None:
    worker = changed(sweep, guard_action="limit")
    history(50, 3)
    add_statuses(10_001, DUE)

    first = run_sweep(worker, clock=clock)
    alert = alerts(worker, clock)
    second = run_sweep(worker, clock=clock)

    assert (first.outcome, first.reason, first.exit_code) == ("partial", "breaker", 0)
    assert (first.counts["deleted_rows"], second.counts["deleted_rows"]) == (10_000, 1)
    assert alert == [
        "more than 10,000 rows are stale; the last 50 runs processed 3 at most, the breaker allows 10,000; each run "
        f"stops there; to process all at once: housekeeping plan {worker.name}, then run --confirm"
    ]
    assert (second.outcome, alerts(worker, clock)) == ("done", [])


@pytest.mark.parametrize(("stale", "outcome", "left"), [(24, "done", 0), (25, "done", 0), (26, "partial", 1)])
def test_last_batch_shrinks_to_the_limit(
    add_statuses: AddStatuses, history: History, low_floor: None, stale: int, outcome: str, left: int
) -> None:
    history(10, 25)
    add_statuses(stale, DUE)
    sizes = Sizes()

    result = run_sweep(changed(LIMITED, times_history=1, guard_action="limit"), on_batch=sizes)

    assert (result.outcome, UserStatus.select().count()) == (outcome, left)
    assert sizes.seen == [10, 10, stale - left - 20]


def test_rows_that_become_stale_in_the_run_alert_at_the_limit(
    add_statuses: AddStatuses, history: History, low_floor: None, clock: ManualClock
) -> None:
    history(10, 0)
    add_statuses(6, DUE)

    def more(counts: Counts) -> None:
        if counts["batches"] == 1:
            add_statuses(100, DUE, first_id=1000)

    result = run_sweep(changed(LIMITED, batch=5), clock=clock, on_batch=more)

    assert (result.reason, result.counts["deleted_rows"]) == ("breaker", 10)
    assert alerts(LIMITED, clock)[0].startswith("more than 10 rows are stale; ")


def test_limit_counts_the_rows_of_all_stages(
    add_statuses: AddStatuses, history: History, low_floor: None, clock: ManualClock
) -> None:
    history(10, 0)
    add_statuses(16, DUE)

    def halves(worker: Sweep) -> list[Stage]:
        (whole,) = LIMITED.declared_stages()
        assert isinstance(whole, TableStage)
        return [
            dataclasses.replace(whole, name="low", stale=lambda now: whole.stale(now) & (UserStatus.user_id <= 8)),
            dataclasses.replace(whole, name="high", stale=lambda now: whole.stale(now) & (UserStatus.user_id > 8)),
        ]

    staged = dataclasses.replace(LIMITED, stages=halves)
    first = run_sweep(staged, clock=clock)
    left = [row.user_id for row in UserStatus.select().order_by(UserStatus.user_id)]
    second = run_sweep(staged, clock=clock)

    assert (first.reason, first.counts["deleted_rows"]) == ("breaker", 10)
    assert left == list(range(11, 17)), "eight of the first stage and two of the second are gone"
    assert (second.outcome, second.counts["deleted_rows"]) == ("done", 6)


def test_rows_that_cannot_be_deleted_do_not_pin_the_next_run(
    add_statuses: AddStatuses, history: History, low_floor: None, clock: ManualClock, plant: Plant
) -> None:
    history(10, 0)
    add_statuses(35, DUE)
    plant("DELETE ON user_statuses", "OLD.user_id <= 12", "RAISE 'kept'")

    deleted = [run_sweep(LIMITED, clock=clock).counts["deleted_rows"] for _ in range(3)]

    assert deleted == [10, 10, 3]
    assert UserStatus.select().count() == 12


def test_calls_of_an_own_sweep_are_limited(postgres: Database, low_floor: None, clock: ManualClock) -> None:
    postgres.create_tables([Order])
    past_runs(10, 0, worker="shop.stuck_orders", counted_as="moved_rows")
    add(23)
    outside = Outside()
    limited = orders_sweep(outside, guard_action="limit", batch=4)

    reasons = [run_sweep(limited, clock=clock).reason for _ in range(3)]

    assert (reasons, outside.asked) == (["breaker", "breaker", None], list(range(1, 24)))


def test_limited_runs_do_not_make_the_flood_usual(
    add_statuses: AddStatuses, history: History, low_floor: None, clock: ManualClock
) -> None:
    history(10, 0)
    add_statuses(45, DUE)

    deleted = []
    for _ in range(5):
        deleted.append(run_sweep(LIMITED, clock=clock).counts["deleted_rows"])
        clock.advance(timedelta(minutes=1))

    assert deleted == [10, 10, 10, 10, 5]
