"""A run resumes from the cursor of another one, with any types of columns in its order."""

from __future__ import annotations

import threading
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from typing import Any, Final
from uuid import UUID

import pytest
from peewee import (
    AutoField,
    BinaryUUIDField,
    BlobField,
    DateField,
    DateTimeField,
    DecimalField,
    DoubleField,
    Field,
    IntegerField,
    TextField,
    TimeField,
    UUIDField,
)

from housekeeping import BaseModel, Delete, Sweep, UtcDateTimeField
from housekeeping.database.connection import Database
from housekeeping.sweeps.engine.runner import run_sweep

_ROWS: Final = 11
_NEW_YEAR: Final = datetime(2026, 1, 1, tzinfo=UTC)
#: A column, and its value in row 1, 2, 3, ...
_COLUMNS: Final[dict[str, tuple[Field, Any]]] = {
    "bytea": (BlobField(), lambda n: bytes([n, 0, 255])),
    "uuid as bytea": (BinaryUUIDField(), lambda n: UUID(int=n << 100)),
    "uuid": (UUIDField(), lambda n: UUID(int=n << 100)),
    "timestamptz": (UtcDateTimeField(), lambda n: _NEW_YEAR + n * timedelta(microseconds=1)),
    "timestamp": (DateTimeField(), lambda n: (_NEW_YEAR + n * timedelta(microseconds=1)).replace(tzinfo=None)),
    "date": (DateField(), lambda n: date(2026, 1, n)),
    "time": (TimeField(), lambda n: time(1, n, 0, n)),
    "numeric": (DecimalField(20, 10), lambda n: Decimal(n) / 7),
    "double": (DoubleField(), lambda n: n / 7),
    "text": (TextField(), lambda n: f"{n:02}%s'\\"),
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
        name="shop.parcels",
        stale=lambda now: Parcel.id > 0,
        always_stale=True,
        order=(Parcel.due, Parcel.id),
        action=Delete(),
        batch_size=2,
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
    orders = [(Parcel.due, Parcel.id), (Parcel.weight, Parcel.id)]
    before, after = (
        Sweep(
            name="shop.parcels",
            stale=lambda now: Parcel.id > 0,
            always_stale=True,
            order=order,
            action=Delete(),
            batch_size=2,
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
        name="shop.machines",
        stale=lambda now: Machine.node != "",
        always_stale=True,
        order=(Machine.node,),
        action=Delete(),
        batch_size=2,
    )

    assert (run_sweep(machines).outcome, Machine.select().count()) == ("done", 0)


def _set() -> threading.Event:
    stopping = threading.Event()
    stopping.set()
    return stopping
