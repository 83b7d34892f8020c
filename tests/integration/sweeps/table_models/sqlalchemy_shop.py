"""Tables and mapped classes of an application on SQLAlchemy."""

from __future__ import annotations

import enum
import uuid
from datetime import datetime
from typing import Any

from sqlalchemy import BigInteger, Column, DateTime, Enum, ForeignKey, Integer, MetaData, String, Table, Text
from sqlalchemy.dialects.postgresql import ARRAY, INET, JSONB
from sqlalchemy.orm import DeclarativeBase, Mapped, column_property, mapped_column


class Mood(enum.Enum):
    GLAD = "a glad one"
    SAD = "a sad one"


class Base(DeclarativeBase):
    pass


class Session(Base):
    __tablename__ = "sa_session"

    id: Mapped[uuid.UUID] = mapped_column(primary_key=True, default=uuid.uuid4)
    expires: Mapped[datetime | None] = mapped_column("expires_at", DateTime(timezone=True))
    mood: Mapped[Mood] = mapped_column(Enum(Mood, native_enum=False), default=Mood.GLAD)
    details: Mapped[dict[str, Any]] = mapped_column(JSONB, default=dict)
    tags: Mapped[list[str]] = mapped_column(ARRAY(String(20)), default=list)
    address: Mapped[str | None] = mapped_column(INET)
    seen_at: Mapped[datetime | None] = mapped_column(DateTime())


Session.twice = column_property(Session.expires + Session.expires.op("-")(Session.expires))


class Person(Base):
    __tablename__ = "sa_person"

    id: Mapped[int] = mapped_column(primary_key=True)
    kind: Mapped[str]
    __mapper_args__ = {"polymorphic_on": "kind", "polymorphic_identity": "person"}


class Guest(Person):
    __mapper_args__ = {"polymorphic_identity": "guest"}


class Member(Person):
    __tablename__ = "sa_member"

    id: Mapped[int] = mapped_column(ForeignKey("sa_person.id"), primary_key=True)
    __mapper_args__ = {"polymorphic_identity": "member"}


metadata = MetaData()
lines = Table(
    "line",
    metadata,
    Column("order_id", BigInteger, primary_key=True),
    Column("line no", Integer, primary_key=True),
    Column("mood", Enum(Mood, name="mood"), nullable=False),
    Column("touched_at", DateTime(timezone=True), nullable=False),
    Column("delete", Text),
)
keyless = Table("keyless", metadata, Column("n", Integer))
