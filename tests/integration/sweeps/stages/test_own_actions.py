"""Actions of an application's own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from peewee import SQL, BigAutoField, BigIntegerField, CompositeKey, Expression, Tuple

from housekeeping import BaseModel, Delete, Sweep, UtcDateTimeField
from housekeeping.core.errors import DeclarationError
from housekeeping.database.connection import Database
from housekeeping.sweeps.engine.runner import run_sweep
from housekeeping.sweeps.insight.plan import plan
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


class Reading(BaseModel):
    id = BigIntegerField()
    happened_at = UtcDateTimeField()

    class Meta:
        primary_key = CompositeKey("id", "happened_at")


class ReadingByHalf(BaseModel):
    """The same table, declared with a part of its key."""

    id = BigIntegerField(primary_key=True)
    happened_at = UtcDateTimeField()

    class Meta:
        table_name = "reading"


class ReadingNote(BaseModel):
    id = BigAutoField()
    reading_id = BigIntegerField()
    reading_at = UtcDateTimeField()


@dataclass(frozen=True)
class DeleteWithNotes(Delete):
    """Deletes readings with their notes.

    Attributes:
      returned, compared: The columns that the first statement returns, and those that the second one compares.
    """

    returned: Sequence[Any] = ("id", "happened_at")
    compared: Sequence[str] = ("id", "happened_at")

    @property
    def counted_as(self) -> Sequence[str]:
        return ("deleted_readings", "deleted_notes")

    def write(self, table: TableStage, batch: Batch, chosen: Expression) -> Write:
        returned = [getattr(table.model, each) if isinstance(each, str) else each for each in self.returned]
        gone = table.model.delete().where(chosen).returning(*returned).cte("gone")
        mine = {"id": ReadingNote.reading_id, "happened_at": ReadingNote.reading_at}
        same = Tuple(*(mine[name] for name in self.compared)).in_(
            gone.select(*(getattr(gone.c, name) for name in self.compared))
        )
        return Write([gone, ReadingNote.delete().where(same).returning(ReadingNote.id).cte("notes")], self.counted_as)


@pytest.fixture
def readings(postgres: Database) -> None:
    """Two readings of each of three ids, one old and one new, with a note each."""
    postgres.create_tables([Reading, ReadingNote])
    postgres.execute_sql(
        "INSERT INTO reading SELECT id, at FROM generate_series(1, 3) AS id, "
        "unnest(ARRAY['2020-01-01', '2999-01-01']::timestamptz[]) AS at"
    )
    postgres.execute_sql("INSERT INTO reading_note (reading_id, reading_at) SELECT id, happened_at FROM reading")


def _readings(action: Action, model: Any = Reading) -> Sweep:
    order = (model.happened_at, model.id)
    return Sweep(name="shop.readings", stale=lambda now: model.happened_at < now, order=order, action=action)


def _left() -> tuple[int, int]:
    return Reading.select().count(), ReadingNote.select().count()


COMPARE = "compare all of them in the other statements: Tuple(...).in_(gone.select(gone.c.id, gone.c.happened_at))"
PARTS_OF_A_KEY = [
    (("id",), ("id",), "the first statement of its action's Write returns (id), but rows of "),
    ((), ("id",), "the first statement of its action's Write returns nothing, but rows of "),
    (("id", "happened_at"), ("id",), "a statement of its action's Write compares only (id) of the rows of "),
]


@pytest.mark.parametrize("model", [Reading, ReadingByHalf])
@pytest.mark.parametrize(("returned", "compared", "refused"), PARTS_OF_A_KEY)
def test_action_that_names_a_part_of_the_key_is_refused_before_a_change(
    readings: None, returned: Sequence[str], compared: Sequence[str], refused: str, model: Any
) -> None:
    sweep = _readings(DeleteWithNotes(returned=returned, compared=compared), model)

    with pytest.raises(DeclarationError) as planned:
        plan(sweep)
    result = run_sweep(sweep)

    assert (result.outcome, result.reason, _left()) == ("failed", str(planned.value), (6, 6))
    assert str(planned.value).startswith(f"shop.readings: rows: {refused}{model.__name__}")
    assert str(planned.value).endswith(COMPARE)


@pytest.mark.parametrize("returned", [("id", "happened_at"), (SQL("*"),), (Reading,)])
def test_action_that_returns_and_compares_the_whole_key_is_accepted(readings: None, returned: Sequence[Any]) -> None:
    result = run_sweep(_readings(DeleteWithNotes(returned=returned)))

    assert (result.outcome, result.counts["deleted_notes"], _left()) == ("done", 3, (3, 3))
