"""Many rows that cannot be processed, one after another, do not keep the rows behind them from being processed."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, Final

import pytest
from peewee import BigIntegerField

from housekeeping import BaseModel, Delete, Guard, Limits, Rows, Sweep, UtcDateTimeField
from housekeeping.testing.stubs import ManualClock
from housekeeping.workers.user_status_cleanup.models import UserStatus
from tests.declarations import changed, stage_of
from tests.integration.conftest import AddStatuses, Plant
from tests.integration.sweeps.engine.executed import DUE
from tests.integration.sweeps.orders import Order, Outside, add
from tests.integration.sweeps.orders import sweep as orders_sweep
from tests.internals.database import Database
from tests.internals.engine import batches, run_sweep
from tests.internals.ledger import Run
from tests.internals.sweeps import TableStage
from tests.internals.workers import status_sweep as sweep


class Reading(BaseModel):
    id = BigIntegerField(primary_key=True)
    at = UtcDateTimeField(null=True)

    class Meta:
        table_name = "readings"


#: The sweep with more time than its rows need on a busy machine.
LONG: Final = changed(sweep, runtime=timedelta(minutes=30), batch=50)
#: Makes the deletion of the statuses that the SQL condition holds for fail.
Refuse = Callable[[str], None]


@pytest.fixture
def refuse(statuses: type[UserStatus], plant: Plant) -> Refuse:
    return lambda condition: plant("DELETE ON user_statuses", condition, "RAISE EXCEPTION 'not today'")


def _ids() -> list[int]:
    return [row.user_id for row in UserStatus.select().order_by(UserStatus.user_id)]


@pytest.mark.parametrize(
    ("bad", "is_bad"),
    [
        pytest.param("id <= 45", lambda n: n <= 45, id="front"),
        pytest.param("id BETWEEN 26 AND 70", lambda n: 26 <= n <= 70, id="middle"),
        pytest.param("id > 75", lambda n: n > 75, id="end"),
        pytest.param("id / 15 % 2 = 1", lambda n: n // 15 % 2 == 1, id="every second fifteen"),
        pytest.param("id <= 50 AND id % 25 > 0", lambda n: n <= 50 and n % 25 > 0, id="24 of 25"),
    ],
)
def test_good_rows_are_processed_in_one_run_wherever_bad_rows_are(
    add_statuses: AddStatuses,
    refuse: Refuse,
    bad: str,
    is_bad: Callable[[int], bool],
    reported: list[dict[str, Any]],
) -> None:
    add_statuses(100, DUE)
    refuse(bad.replace("id", "OLD.user_id"))

    result = run_sweep(LONG)

    kept = [n for n in range(1, 101) if is_bad(n)]
    assert _ids() == kept
    assert (result.outcome, result.counts["deleted_rows"], result.counts["failed"]) == (
        "done",
        100 - len(kept),
        len(kept),
    )
    assert [about["rows"] for about in reported] == [len(kept)], "one report of the cause"


@pytest.fixture
def most_failures(monkeypatch: pytest.MonkeyPatch) -> int:
    """The number of bad rows in a row after which a run leaves their stage, lowered."""
    monkeypatch.setattr(batches, "MOST_FAILURES", 20)
    return 20


def test_too_many_bad_rows_end_the_run_and_the_next_continues_behind_them(
    add_statuses: AddStatuses, refuse: Refuse, most_failures: int, last_run: Callable[[], Run]
) -> None:
    add_statuses(75, DUE)
    refuse("OLD.user_id <= 50")

    found = []
    for _ in range(3):
        result = run_sweep(LONG)
        found.append((result.outcome, result.counts["failed"], last_run().cursor["after"][1]))

    assert found[:2] == [("failed", 20, 20), ("failed", 40, 40)], "the second one also tried those in front"
    assert result.reason == "20 rows in a row failed, the last one with: not today"
    assert (result.counts["deleted_rows"], _ids()) == (25, list(range(1, 51)))


@pytest.mark.slow
def test_thousand_bad_rows_in_front_are_passed_in_the_first_run(add_statuses: AddStatuses, refuse: Refuse) -> None:
    add_statuses(1050, DUE)
    refuse("OLD.user_id < 1000")

    result = run_sweep(LONG)

    assert (result.outcome, result.counts["deleted_rows"], result.counts["failed"]) == ("done", 51, 999)


@pytest.mark.parametrize("batch", [10, pytest.param(60, id="one batch")])
def test_bad_rows_that_take_all_the_time_are_passed_by_the_next_run(postgres: Database, batch: int) -> None:
    postgres.create_tables([Order])
    add(60)
    clock = ManualClock()

    def call(order: Order) -> None:
        if order.id <= 40:
            clock.advance(timedelta(seconds=10))
            raise ValueError("no")

    slow = changed(orders_sweep(call), batch=batch, runtime=timedelta(seconds=350))
    first, second = (run_sweep(slow, clock=clock) for _ in range(2))

    assert (first.outcome, first.counts["moved_rows"]) == ("failed", 0)
    assert second.counts["moved_rows"] == 20, "before it tried those in front again"


def test_run_whose_time_ends_after_a_changed_row_is_partial_despite_bad_rows_before(postgres: Database) -> None:
    postgres.create_tables([Order])
    add(60)
    clock = ManualClock()

    def call(order: Order) -> None:
        if order.id <= 30:
            raise ValueError("no")
        clock.advance(timedelta(seconds=10))

    result = run_sweep(changed(orders_sweep(call), batch=10, runtime=timedelta(seconds=50)), clock=clock)

    assert (result.outcome, result.reason, result.counts["failed"]) == ("partial", "out_of_time", 30)


@pytest.mark.parametrize("bad", [15, 30])
def test_rows_that_become_due_behind_a_bad_region_are_deleted(
    add_statuses: AddStatuses, refuse: Refuse, most_failures: int, bad: int
) -> None:
    refuse(f"OLD.user_id <= {bad}")
    add_statuses(bad, DUE)
    for number in (10_000, 20_000):
        add_statuses(25, "now() - interval '1 minute'", first_id=number)

        for _ in range(2):
            run_sweep(LONG)

        assert _ids() == list(range(1, bad + 1))


def test_resumed_run_that_leaves_a_stage_still_processes_the_rows_in_front(
    add_statuses: AddStatuses, refuse: Refuse, most_failures: int
) -> None:
    add_statuses(50, DUE)
    refuse("OLD.user_id <= 50")
    run_sweep(LONG)
    add_statuses(10, "now() - interval '2 hours'", first_id=1000)

    result = run_sweep(LONG)

    assert (result.outcome, result.counts["deleted_rows"], _ids()) == ("failed", 10, list(range(1, 51)))


def test_bad_region_of_a_stage_does_not_keep_the_next_stage(
    add_statuses: AddStatuses, refuse: Refuse, most_failures: int
) -> None:
    add_statuses(100, DUE)
    refuse("OLD.user_id <= 30")
    stages = [
        TableStage(
            name=name,
            stale=lambda now, condition=condition: UserStatus.scheduled_for_cleanup(now) & condition,
            order=stage_of(sweep).order,
            action=Delete(),
            batch_size=10,
        )
        for name, condition in [("first", UserStatus.user_id <= 50), ("second", UserStatus.user_id > 50)]
    ]
    two = Sweep(
        "shop.two_stages", lambda _: stages, limits=Limits(runtime=timedelta(minutes=1)), guard=Guard(first_run=False)
    )

    first, second = run_sweep(two), run_sweep(two)

    assert (first.outcome, first.counts["deleted_rows"], first.counts["failed"]) == ("failed", 50, 20)
    assert second.counts["deleted_rows"] == 20


@pytest.mark.slow
def test_rows_without_a_time_behind_bad_rows_are_processed(postgres: Database, plant: Plant) -> None:
    # Rows with NULL in the order column come last, and have a keyset of their own.
    postgres.execute_sql(
        "CREATE TABLE readings (id bigint PRIMARY KEY, at timestamptz);"
        "INSERT INTO readings SELECT n, CASE WHEN n <= 100 THEN now() END FROM generate_series(1, 200) AS n"
    )
    plant("DELETE ON readings", "OLD.id <= 100", "RAISE EXCEPTION 'not today'")
    readings = Sweep("shop.readings", Rows(Reading, stale=lambda row: row.id > 0, order="at", action=Delete()))

    result = run_sweep(readings)

    assert (result.outcome, result.counts["deleted_rows"], result.counts["failed"]) == ("done", 100, 100)


def test_call_that_fails_for_many_rows_reaches_the_rows_behind_them(postgres: Database) -> None:
    postgres.create_tables([Order])
    add(150)
    outside = Outside(*range(1, 101))

    result = run_sweep(orders_sweep(outside), clock=ManualClock())

    assert (result.outcome, result.counts["moved_rows"], result.counts["failed"]) == ("done", 50, 100)


def test_call_that_always_fails_is_called_a_bounded_number_of_times(postgres: Database, most_failures: int) -> None:
    postgres.create_tables([Order])
    add(150)
    outside = Outside(*range(1, 151))

    result = run_sweep(orders_sweep(outside), clock=ManualClock())

    assert (result.outcome, result.counts["moved_rows"]) == ("failed", 0)
    assert len(outside.asked) <= 100, "the first batch"
