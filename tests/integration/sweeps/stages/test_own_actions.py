"""Actions of an application's own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from peewee import SQL, BigAutoField, BigIntegerField, CompositeKey, Expression, Select, Tuple, fn

from housekeeping import BaseModel, Delete, Limits, Rows, Sweep, UtcDateTimeField
from tests.integration.sweeps.orders import Order, add, stuck
from tests.internals.core import DeclarationError
from tests.internals.database import Database
from tests.internals.engine import run_sweep
from tests.internals.insight import plan
from tests.internals.sweeps import Action, Batch, TableStage, Write


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


@pytest.fixture
def orders(postgres: Database) -> None:
    postgres.create_tables([Order])
    add(12)


def _sweep(action: Action) -> Sweep:
    rows = Rows(Order, stale=stuck, order="updated_at", action=action)
    return Sweep("shop.removed", rows, limits=Limits(batch=5, batch_takes=None))


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
    rows = Rows(model, stale=lambda row, now: row.happened_at < now, order="happened_at", action=action)
    return Sweep("shop.readings", rows)


def _left() -> tuple[int, int]:
    return Reading.select().count(), ReadingNote.select().count()


COMPARE = "compare them: Tuple(...).in_(gone.select(gone.c.id, gone.c.happened_at))"
RETURN = "write .returning(*table.key)"
PARTS_OF_A_KEY = [
    (("id",), ("id",), "the first statement of its action's Write returns (id), but rows of ", RETURN),
    ((), ("id",), "the first statement of its action's Write returns nothing, but rows of ", RETURN),
    (
        ("id", "happened_at"),
        ("id",),
        "statement 2 of its action's Write (notes) does not compare its rows with ",
        COMPARE,
    ),
]


@pytest.mark.parametrize("model", [Reading, ReadingByHalf])
@pytest.mark.parametrize(("returned", "compared", "refused", "way_out"), PARTS_OF_A_KEY)
def test_action_that_names_a_part_of_the_key_is_refused_before_a_change(
    readings: None, returned: Sequence[str], compared: Sequence[str], refused: str, way_out: str, model: Any
) -> None:
    sweep = _readings(DeleteWithNotes(returned=returned, compared=compared), model)

    with pytest.raises(DeclarationError) as planned:
        plan(sweep)
    result = run_sweep(sweep)

    assert (result.outcome, result.reason, _left()) == ("failed", str(planned.value), (6, 6))
    assert str(planned.value).startswith(f"shop.readings: rows: {refused}")
    assert str(planned.value).endswith(way_out)


@pytest.mark.parametrize("returned", [("id", "happened_at"), (SQL("*"),), (Reading,)])
def test_action_that_returns_and_compares_the_whole_key_is_accepted(readings: None, returned: Sequence[Any]) -> None:
    result = run_sweep(_readings(DeleteWithNotes(returned=returned)))

    assert (result.outcome, result.counts["deleted_notes"], _left()) == ("done", 3, (3, 3))


class ReadingMark(BaseModel):
    id = BigAutoField()
    note_id = BigIntegerField()


@dataclass(frozen=True)
class DeleteWithOtherNotes(Delete):
    """Deletes readings, and notes that its `others` selects.

    Attributes:
      others: Returns the further statements, given the first one, the stage and the condition of the batch's rows.
    """

    others: Callable[[Any, TableStage, Any], Sequence[Any]] = lambda gone, table, chosen: ()
    names: Sequence[str] = ("gone", "notes")

    @property
    def counted_as(self) -> Sequence[str]:
        return self.names

    def write(self, table: TableStage, batch: Batch, chosen: Expression) -> Write:
        gone = Reading.delete().where(chosen).returning(*table.key).cte("gone")
        return Write([gone, *self.others(gone, table, chosen)], self.counted_as)


def _by_predicate(gone: Any, table: TableStage, chosen: Any) -> Sequence[Any]:
    stale = ReadingNote.reading_at < SQL("'2026-01-01'")
    return [ReadingNote.delete().where(stale).returning(ReadingNote.id).cte("notes")]


def _by_condition_of_the_batch(gone: Any, table: TableStage, chosen: Any) -> Sequence[Any]:
    ids = ReadingNote.reading_id.in_(Reading.select(Reading.id).where(chosen))
    return [ReadingNote.delete().where(ids).returning(ReadingNote.id).cte("notes")]


def _by_existence(gone: Any, table: TableStage, chosen: Any) -> Sequence[Any]:
    found = Select((gone,), [fn.COUNT(SQL("1"))]) > 0
    return [ReadingNote.delete().where(found).returning(ReadingNote.id).cte("notes")]


@pytest.mark.parametrize("others", [_by_predicate, _by_condition_of_the_batch, _by_existence])
def test_statement_that_ignores_the_changed_rows_is_refused_beforehand(readings: None, others: Any) -> None:
    sweep = _readings(DeleteWithOtherNotes(others=others))

    with pytest.raises(DeclarationError) as planned:
        plan(sweep)
    result = run_sweep(sweep)

    assert (result.outcome, result.reason, _left()) == ("failed", str(planned.value), (6, 6))
    reason = str(result.reason)
    assert "statement 2 of its action's Write (notes) does not compare its rows with the whole key" in reason
    assert reason.endswith("Tuple(...).in_(gone.select(gone.c.id, gone.c.happened_at))")


def _in_a_chain(gone: Any, table: TableStage, chosen: Any) -> Sequence[Any]:
    same = Tuple(ReadingNote.reading_id, ReadingNote.reading_at).in_(gone.select(gone.c.id, gone.c.happened_at))
    notes = ReadingNote.delete().where(same).returning(ReadingNote.id).cte("notes")
    marks = ReadingMark.delete().where(ReadingMark.note_id.in_(notes.select(notes.c.id)))
    return [notes, marks.returning(ReadingMark.id).cte("marks")]


def _in_raw_sql(gone: Any, table: TableStage, chosen: Any) -> Sequence[Any]:
    same = SQL("(reading_id, reading_at) IN (SELECT id, happened_at FROM gone)")
    return [ReadingNote.delete().where(same).returning(ReadingNote.id).cte("notes")]


@pytest.mark.parametrize(
    ("others", "names"), [(_in_a_chain, ("gone", "notes", "marks")), (_in_raw_sql, ("gone", "notes"))]
)
def test_statement_that_follows_the_changed_rows_is_accepted(
    readings: None, postgres: Database, others: Any, names: Sequence[str]
) -> None:
    postgres.create_tables([ReadingMark])
    postgres.execute_sql("INSERT INTO reading_mark (note_id) SELECT id FROM reading_note")

    result = run_sweep(_readings(DeleteWithOtherNotes(others=others, names=names)))

    assert (result.outcome, [result.counts[name] for name in names], _left()) == ("done", [3] * len(names), (3, 3))
