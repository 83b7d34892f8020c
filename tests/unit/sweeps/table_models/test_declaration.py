"""`Rows` on tables of other libraries: their order, their columns, and what is imported."""

from __future__ import annotations

import subprocess
import sys
from datetime import datetime
from typing import Any

import pytest
from blinker import NamedSignal
from peewee import BigAutoField, CompositeKey, IntegerField
from sqlalchemy import DateTime
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from housekeeping import BaseModel, Delete, Event, Rows, Sweep, UtcDateTimeField
from tests.declarations import stage_of
from tests.internals.core import DeclarationError
from tests.internals.sweeps import keyset_order

WITHOUT = """
import sys
from housekeeping import BaseModel, Delete, Rows, Sweep
from peewee import DateTimeField

class Session(BaseModel):
    ends = DateTimeField()

Sweep("a", Rows(Session, stale=lambda row, now: row.ends < now, action=Delete()))
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


def test_peewee_model_is_used_as_it_is() -> None:
    sweep = Sweep("a", Rows(Session, stale=lambda row, now: row.ends_at < now, order="ends_at", action=Delete()))

    assert stage_of(sweep).order[0] is Session.ends_at
    assert sweep.model is Session


def test_event_renames_columns() -> None:
    event = Event(NamedSignal("gone"), session="id")

    stage = stage_of(
        Sweep(
            "a", Rows(Session, stale=lambda row, now: row.ends_at < now, order="ends_at", action=Delete(), event=event)
        )
    )

    assert stage.event is not None
    assert (stage.event.signal, stage.event.columns) == (event.signal, {"session": "id"})


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
        ({"order": "seen_at"}, "a: Visit has no column 'seen_at'; its columns are id, at"),
        ({"event": Event(NamedSignal("gone"), "seen_at")}, "a: Visit has no column 'seen_at'"),
        ({"stale": lambda: None}, f"Rows: stale is called with a row and the time; write {ROW_EXAMPLE}"),
        ({"stale": "at"}, "Rows: stale is 'at'; write a function"),
        ({"stale": lambda row, now: row.id > 3}, f"comparison with it: {ROW_EXAMPLE}; or lambda row: ..., if"),
        ({"stale": lambda row, now: None}, f"write a condition on columns: {ROW_EXAMPLE}"),
        ({"stale": lambda row, now: Visit.at < now}, "stale returns an object of type BinaryExpression; write a cond"),
        (
            {"stale": lambda row, now: row.seen_at < now},
            "a: stale reads row.seen_at, but Visit has no column",
        ),
    ],
)
def test_wrong_option_is_rejected_with_what_to_write(given: dict[str, Any], text: str) -> None:
    options: dict[str, Any] = {"stale": lambda row, now: row.at < now, "action": Delete(), **given}

    with pytest.raises(DeclarationError) as rejected:
        Sweep("a", Rows(Visit, **options))

    assert text in str(rejected.value)


def test_django_and_sqlalchemy_are_not_imported_by_default() -> None:
    command = [sys.executable, "-c", WITHOUT]

    assert subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout == "[]\n"
