"""Actions of an application's own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from peewee import Expression

from housekeeping import Sweep
from housekeeping.database.connection import Database
from housekeeping.sweeps.engine.runner import run_sweep
from housekeeping.sweeps.stages.actions import Action, Write
from housekeeping.sweeps.stages.stage import Batch, BatchResult
from housekeeping.sweeps.stages.table_stage import TableStage
from tests.integration.sweeps.orders import Order, add, stuck


@dataclass(frozen=True)
class Remove:
    """Deletes orders in one statement.

    Attributes:
      counted_as: The names of its counts, also of what it does another way.
      counts: Those of the statement.
    """

    counted_as: Sequence[str]
    counts: Sequence[str]

    def write(self, table: TableStage, batch: Batch, chosen: Expression) -> Write:
        delete: Any = Order.delete().where(chosen).returning(Order.id)
        return Write([delete.cte("removed")], self.counts)

    def fallback(self, table: TableStage, batch: Batch, error: BaseException) -> BatchResult | None:
        return None


@pytest.fixture
def orders(postgres: Database) -> None:
    postgres.create_tables([Order])
    add(12)


def _sweep(action: Action) -> Sweep:
    order = (Order.updated_at, Order.id)
    return Sweep(name="shop.removed", stale=stuck, order=order, action=action, batch_size=5)


def test_action_may_count_more_than_its_statement(orders: None) -> None:
    result = run_sweep(_sweep(Remove(("removed", "kept"), ("removed",))))

    assert (result.outcome, result.counts["removed"], result.counts["kept"]) == ("done", 12, 0)


@pytest.mark.parametrize("counts", [(), ("kept",), ("removed", "kept")])
def test_counts_unlike_the_statements_end_the_run_before_a_change(orders: None, counts: tuple[str, ...]) -> None:
    result = run_sweep(_sweep(Remove(("removed", "kept"), counts)))

    assert result.outcome == "failed"
    assert "be one for each statement, as counted_as begins: removed" in str(result.reason)
    assert Order.select().count() == 12
