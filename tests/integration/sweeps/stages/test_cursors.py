"""A run resumes from the cursor of another one, with any types of columns in its order."""

from __future__ import annotations

import threading
from datetime import UTC, datetime, time, timedelta
from typing import Any, Final
from uuid import UUID

import pytest
from peewee import (
    AutoField,
    BinaryUUIDField,
    DateTimeField,
    Field,
    IntegerField,
    TextField,
    TimeField,
)

from housekeeping import BaseModel, Delete, Limits, Rows, Sweep, UtcDateTimeField
from tests.internals.database import Database
from tests.internals.engine import run_sweep

_ROWS: Final = 11
_NEW_YEAR: Final = datetime(2026, 1, 1, tzinfo=UTC)
#: A column, and its value in row 1, 2, 3, ... `test_every_row` stops and resumes runs over other types.
_COLUMNS: Final[dict[str, tuple[Field, Any]]] = {
    "uuid as bytea": (BinaryUUIDField(), lambda n: UUID(int=n << 100)),
    "timestamp": (DateTimeField(), lambda n: (_NEW_YEAR + n * timedelta(microseconds=1)).replace(tzinfo=None)),
    "time": (TimeField(), lambda n: time(1, n, 0, n)),
}


@pytest.mark.parametrize("kind", _COLUMNS)
def test_repeatedly_stopped_runs_miss_no_row(postgres: Database, kind: str) -> None:
    column, value = _COLUMNS[kind]

    class Parcel(BaseModel):
        id = AutoField()
        due = column

    postgres.create_tables([Parcel])
    for number in range(1, _ROWS + 1):
        Parcel.create(due=value(number))
    parcels = Sweep(
        "shop.parcels",
        Rows(Parcel, stale=lambda row: row.id > 0, order="due", action=Delete()),
        limits=Limits(batch=2, batch_takes=None),
    )

    outcomes = [run_sweep(parcels, stopping=_set()).outcome for _ in range(7)]

    # The sixth comes to the end; whether something is left before its beginning is seen by the seventh.
    assert outcomes == ["partial"] * 6 + ["done"]
    assert Parcel.select().count() == 0


@pytest.mark.parametrize("number", [0, 1], ids=["from a time", "from a number"])
def test_cursor_of_another_order_begins_at_the_front(postgres: Database, number: int) -> None:
    class Parcel(BaseModel):
        id = AutoField()
        due = UtcDateTimeField()
        weight = IntegerField()

    postgres.create_tables([Parcel])
    for row in range(1, _ROWS + 1):
        Parcel.create(due=_NEW_YEAR, weight=row)
    orders = ["due", "weight"]
    before, after = (
        Sweep(
            "shop.parcels",
            Rows(Parcel, stale=lambda row: row.id > 0, order=order, action=Delete()),
            limits=Limits(batch=2, batch_takes=None),
        )
        for order in (orders[number], orders[1 - number])
    )

    outcomes = [run_sweep(before, stopping=_set()).outcome, run_sweep(after).outcome]

    assert (outcomes, Parcel.select().count()) == (["partial", "done"], 0)


def test_column_with_a_name_of_peewee_can_be_the_key(postgres: Database) -> None:
    class Machine(BaseModel):
        node = TextField(primary_key=True)

    postgres.create_tables([Machine])
    for row in range(_ROWS):
        Machine.create(node=f"node {row:02}")
    machines = Sweep(
        "shop.machines",
        Rows(Machine, stale=lambda row: row.node != "", order="node", action=Delete()),
        limits=Limits(batch=2, batch_takes=None),
    )

    assert (run_sweep(machines).outcome, Machine.select().count()) == ("done", 0)


def _set() -> threading.Event:
    stopping = threading.Event()
    stopping.set()
    return stopping
