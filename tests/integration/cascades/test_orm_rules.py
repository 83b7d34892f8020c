"""`doctor` warns of an ORM that says something else about dependents than the constraint or the sweep."""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy import BigInteger, ForeignKey
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column, relationship

from housekeeping import Delete, Rows, Settings, Sweep
from tests.integration.conftest import Do
from tests.integration.sweeps.table_models import django_shop
from tests.internals.doctor import stages


def warnings(table: Any, delete: Delete) -> list[str]:
    rows = Rows(table, stale=lambda row: row.id < 0, action=delete)
    sweep = Sweep("shop.parents", rows)
    found = stages.examine_stages(Settings.load(), {sweep.name: sweep})
    return [each.text for each in found if each.subject.startswith("dependents") and " means " in each.text]


SESSIONS = """
CREATE TABLE shop_customer (id bigint PRIMARY KEY);
CREATE TABLE shop_session (id uuid PRIMARY KEY, customer_id bigint REFERENCES shop_customer (id) {rule});
CREATE INDEX ON shop_session (customer_id);
"""
ON_DELETE = "shop_session.customer_id: Django's Session.customer has on_delete=CASCADE, which means delete, but "


@pytest.mark.parametrize(
    ("rule", "delete", "found"),
    [
        ("ON DELETE SET NULL", Delete(), [f"{ON_DELETE}ON DELETE SET NULL"]),
        ("ON DELETE CASCADE", Delete(), []),
        ("", Delete(), [f"{ON_DELETE}ON DELETE NO ACTION"]),
        ("", Delete(dependents={"shop_session": "delete"}), []),
        ("", Delete(dependents={"shop_session": "keep"}), [f'{ON_DELETE}the sweep says "keep"']),
    ],
)
def test_on_delete_of_django_that_contradicts_is_a_warning(do: Do, rule: str, delete: Delete, found: list[str]) -> None:
    do(SESSIONS.format(rule=rule))

    assert warnings(django_shop.Customer, delete) == found


class Base(DeclarativeBase):
    pass


class Parent(Base):
    __tablename__ = "sa_parent"
    id: Mapped[int] = mapped_column(BigInteger, primary_key=True)
    notes: Mapped[list[Note]] = relationship(back_populates="parent")
    marks: Mapped[list[Mark]] = relationship(cascade="all, delete-orphan", passive_deletes=True)
    logs: Mapped[list[Log]] = relationship(passive_deletes="all")


class Note(Base):
    __tablename__ = "sa_note"
    id: Mapped[int] = mapped_column(BigInteger, primary_key=True)
    parent_id: Mapped[int | None] = mapped_column(ForeignKey("sa_parent.id"))
    parent: Mapped[Parent] = relationship(back_populates="notes")


class Mark(Base):
    __tablename__ = "sa_mark"
    id: Mapped[int] = mapped_column(BigInteger, primary_key=True)
    parent_id: Mapped[int | None] = mapped_column(ForeignKey("sa_parent.id"))


class Log(Base):
    __tablename__ = "sa_log"
    id: Mapped[int] = mapped_column(BigInteger, primary_key=True)
    parent_id: Mapped[int | None] = mapped_column(ForeignKey("sa_parent.id"))


def test_relationship_of_sqlalchemy_that_contradicts_is_a_warning(do: Do) -> None:
    do("CREATE TABLE sa_parent (id bigint PRIMARY KEY)")
    for name, rule in {"note": "CASCADE", "mark": "SET NULL", "log": "CASCADE"}.items():
        do(f"CREATE TABLE sa_{name} (id bigint PRIMARY KEY, parent_id bigint REFERENCES sa_parent ON DELETE {rule})")
        do(f"CREATE INDEX ON sa_{name} (parent_id)")

    mark, note = warnings(Parent, Delete(dependents=True))

    assert mark.startswith("sa_mark.parent_id: SQLAlchemy's Parent.marks has cascade=")
    assert mark.endswith("which means delete, but ON DELETE SET NULL")
    assert note.startswith("sa_note.parent_id: SQLAlchemy's Parent.notes has cascade=")
    assert note.endswith("which means clear, but ON DELETE CASCADE")
