"""Later runs of a process, which reuse the statements that earlier runs have compiled."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any

import peewee
import pytest

from housekeeping import Batch, Delete, Limits, Rows, Sweep, TableStage, Write, run_sweep
from housekeeping.testing.stubs import ManualClock
from tests.integration.sweeps.orders import HOUR, NOW, Order
from tests.internals.database import Database


@pytest.fixture
def orders(postgres: Database) -> type[Order]:
    postgres.create_tables([Order])
    return Order


def _sweep(stale: Callable[..., Any], action: Any = None) -> Sweep:
    return Sweep("shop.orders", Rows(Order, stale=stale, order="updated_at", action=action or Delete()))


def _deleted(sweep: Sweep, now: datetime = NOW) -> int:
    result = run_sweep(sweep, clock=ManualClock(now))
    assert result.outcome == "done"
    return int(result.counts["deleted_rows"])


def _left() -> list[str]:
    return [order.reference for order in Order.select().order_by(Order.reference)]


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the names of the CTEs that are compiled from now on."""
    names: list[str] = []
    compile_cte = peewee.CTE.__sql__

    def noted(self: Any, ctx: Any) -> Any:
        names.append(self._alias)
        return compile_cte(self, ctx)

    monkeypatch.setattr(peewee.CTE, "__sql__", noted)
    return names


def test_later_run_compiles_no_statement_of_a_batch(orders: type[Order], compiled: list[str]) -> None:
    sweep = _sweep(lambda row, now: row.updated_at < now)
    _deleted(sweep)
    assert "picked" in compiled
    compiled.clear()

    _deleted(sweep, NOW + HOUR)

    assert "picked" not in compiled


def test_each_run_compares_with_its_own_time(orders: type[Order]) -> None:
    for hours in range(4):
        orders.create(reference=str(hours), updated_at=NOW + hours * HOUR)
    sweep = _sweep(lambda row, now: (row.updated_at <= min(now, NOW + 2 * HOUR)) & (row.updated_at <= now))

    deleted = [_deleted(sweep, NOW + hours * HOUR) for hours in range(4)]

    assert (deleted, _left()) == ([1, 1, 1, 0], ["3"])


@pytest.mark.parametrize(
    ("values", "left"),
    [
        ([["a"], ["b"]], ["c", "d"]),
        ([["a"], ["b", "c"]], ["d"]),
        ([["a", "b"], [], ["d"]], ["c"]),
        ([["a"], ["a"], ["c"]], ["b", "d"]),
    ],
)
def test_run_reads_the_values_of_the_application_again(
    orders: type[Order], values: list[list[str]], left: list[str]
) -> None:
    for reference in "abcd":
        orders.create(reference=reference, updated_at=NOW - HOUR)
    wanted: list[str] = []
    sweep = _sweep(lambda row: row.reference.in_(wanted))

    for some in values:
        wanted[:] = some
        _deleted(sweep)

    assert _left() == left


def test_run_follows_a_predicate_of_another_form(orders: type[Order]) -> None:
    for reference in "abcd":
        orders.create(reference=reference, updated_at=NOW - HOUR)
    conditions: list[Callable[[Any], Any]] = [lambda row: row.reference == "b", lambda row: row.reference >= "b"]
    sweep = _sweep(lambda row: conditions[0](row))

    _deleted(sweep)
    conditions.pop(0)
    _deleted(sweep)

    assert _left() == ["a"]


class DeleteBelow(Delete):
    """Deletes only rows whose reference is lower than the limit of the moment."""

    limit = "b"

    def write(self, table: TableStage, batch: Batch, chosen: Any) -> Write:
        return super().write(table, batch, chosen & (Order.reference < type(self).limit))


def test_run_follows_an_action_that_has_changed(orders: type[Order], monkeypatch: pytest.MonkeyPatch) -> None:
    for reference in "abcd":
        orders.create(reference=reference, updated_at=NOW - HOUR)
    sweep = _sweep(lambda row: row.updated_at < NOW, DeleteBelow())
    run_sweep(sweep)
    assert _left() == ["b", "c", "d"]

    monkeypatch.setattr(DeleteBelow, "limit", "d")
    run_sweep(sweep)

    assert _left() == ["d"]


def test_each_size_of_a_batch_has_its_statement(orders: type[Order]) -> None:
    sweep = Sweep(
        "shop.orders",
        Rows(Order, stale=lambda row, now: row.updated_at < now, order="updated_at", action=Delete()),
        limits=Limits(batch=2, batch_takes=timedelta(minutes=1)),
    )
    for _ in range(3):
        for number in range(25):
            orders.create(reference=str(number), updated_at=NOW - HOUR)

        assert _deleted(sweep) == 25


def test_later_run_notices_that_its_table_has_changed(orders: type[Order], postgres: Database) -> None:
    sweep = _sweep(lambda row, now: row.updated_at < now)
    _deleted(sweep)
    postgres.execute_sql("ALTER TABLE orders RENAME updated_at TO changed_at")
    renamed = run_sweep(sweep)
    postgres.execute_sql("ALTER TABLE orders RENAME changed_at TO updated_at")
    postgres.execute_sql("ALTER TABLE orders DROP CONSTRAINT orders_pkey")
    without_key = run_sweep(sweep)

    assert (renamed.outcome, without_key.outcome) == ("failed", "failed")
    assert "no primary key" in (without_key.reason or "")
