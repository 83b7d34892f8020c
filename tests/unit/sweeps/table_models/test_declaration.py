"""`Sweep.on`: its options, its order, and what it imports."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from datetime import datetime
from typing import Any

import pytest
from blinker import NamedSignal
from peewee import BigAutoField, CompositeKey, Field, IntegerField
from sqlalchemy import DateTime
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from housekeeping import BaseModel, Delete, Sweep, UtcDateTimeField
from housekeeping.core.errors import DeclarationError
from housekeeping.sweeps.options import SweepOptions
from housekeeping.sweeps.table_models.naming import keyset_order

#: Fields of a `Sweep` that `Sweep.on` has in another form, or not at all.
OWN = {"name", "stale", "order", "action", "event_columns", "columns", "stages", "hold"}
WITHOUT = """
import sys
from housekeeping import BaseModel, Delete, Sweep
from peewee import DateTimeField

class Session(BaseModel):
    ends = DateTimeField()

Sweep.on(Session, name="a", stale=lambda row, now: row.ends < now, action=Delete())
print([name for name in ("django", "sqlalchemy") if name in sys.modules])
"""


class Line(BaseModel):
    order_id = IntegerField()
    number = IntegerField()
    at = UtcDateTimeField(column_name="touched_at")

    class Meta:
        primary_key = CompositeKey("order_id", "number")


class Session(BaseModel):
    id = BigAutoField()
    ends_at = UtcDateTimeField()


def test_sweep_options_match_the_fields_of_sweep() -> None:
    options = {name: hint.__forward_arg__ for name, hint in SweepOptions.__annotations__.items()}

    assert options == {field.name: field.type for field in dataclasses.fields(Sweep) if field.name not in OWN}


@pytest.mark.parametrize(
    ("order", "keyset"),
    [
        ((), ["order_id", "number"]),
        ("at", ["at", "order_id", "number"]),
        ("touched_at", ["at", "order_id", "number"]),
        (("at", "order_id"), ["at", "order_id", "number"]),
        (["order_id", "number"], ["order_id", "number"]),
    ],
)
def test_order_ends_with_the_primary_key(order: Any, keyset: list[str]) -> None:
    assert [column.name for column in keyset_order("a", Line, order)] == keyset


def test_order_that_splits_the_primary_key_is_rejected() -> None:
    with pytest.raises(DeclarationError, match="order must end with the primary key"):
        Sweep.on(Line, name="a", stale=lambda row, now: row.at < now, order=("order_id", "at"), action=Delete())


def test_peewee_model_is_used_as_it_is() -> None:
    sweep = Sweep.on(Session, name="a", stale=lambda row, now: row.ends_at < now, order="ends_at", action=Delete())

    assert sweep.order[0] is Session.ends_at
    assert sweep.model is Session


def test_options_are_passed_to_the_sweep() -> None:
    columns: dict[str, Field] = {"session": Session.id}

    sweep = Sweep.on(
        Session,
        name="a",
        stale=lambda row, now: row.ends_at < now,
        action=Delete(),
        batch_size=7,
        event=NamedSignal("gone"),
        event_columns={"session": "id"},
    )

    assert (sweep.batch_size, sweep.event_columns) == (7, columns)


class Base(DeclarativeBase):
    pass


class Visit(Base):
    __tablename__ = "visit"
    id: Mapped[int] = mapped_column(primary_key=True)
    at: Mapped[datetime] = mapped_column(DateTime(timezone=True))


ROW_EXAMPLE = "lambda row, now: row.expires_at <= now"


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"order": Visit.at}, 'a: Visit.at is no name of a column; write it as text: "at"'),
        ({"order": (Visit.at,)}, 'a: Visit.at is no name of a column; write it as text: "at"'),
        ({"order": Session.ends_at}, 'a: Session.ends_at is no name of a column; write it as text: "ends_at"'),
        ({"order": 5}, "a: an object of type int is no name of a column; write it as text"),
        ({"event_columns": {"at": Visit.at}}, 'a: Visit.at is no name of a column; write it as text: "at"'),
        ({"stale": lambda now: now}, "a: stale is called with a row and the time (too many positional arguments); "),
        ({"stale": "at"}, f"a: stale should be a function of a row and the time: {ROW_EXAMPLE}"),
        ({"stale": lambda row, now: row.id > 3}, f"comparison with it: {ROW_EXAMPLE}; or always_stale=True"),
        ({"stale": lambda row, now: None}, f"write a condition on columns: {ROW_EXAMPLE}"),
    ],
)
def test_wrong_option_is_rejected_with_what_to_write(given: dict[str, Any], text: str) -> None:
    options: dict[str, Any] = {"stale": lambda row, now: row.at < now, "action": Delete(), **given}

    with pytest.raises(DeclarationError) as rejected:
        Sweep.on(Visit, name="a", **options)

    assert text in str(rejected.value)


def test_django_and_sqlalchemy_are_not_imported_by_default() -> None:
    command = [sys.executable, "-c", WITHOUT]

    assert subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout == "[]\n"
