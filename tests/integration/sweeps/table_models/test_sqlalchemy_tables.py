"""Sweeps on SQLAlchemy tables and mapped classes: names, types, keys, and classes that a sweep cannot take."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from enum import Enum
from typing import Any

import pytest
from peewee import Field, JSONField, TextField, UUIDField
from psycopg2.extensions import parse_dsn
from sqlalchemy import BigInteger, Column, DateTime, Engine, MetaData, Table, create_engine, insert, join, select
from sqlalchemy.engine import URL
from sqlalchemy.orm import DeclarativeBase, registry
from sqlalchemy.orm import Session as OrmSession

from housekeeping import Delete, StateMachine, Sweep, Transition, UtcDateTimeField
from housekeeping.core.errors import DeclarationError
from housekeeping.database.connection import Database
from housekeeping.sweeps import NaiveUtcDateTimeField, model_of, run_sweep
from housekeeping.sweeps.insight.plan import plan
from housekeeping.sweeps.table_models.columns import EnumField, SqlField
from tests.integration.sweeps.table_models import sqlalchemy_shop as shop

NOW = datetime(2026, 6, 1, tzinfo=UTC)
Session = shop.Session


@pytest.fixture
def engine(application_url: str, postgres: Database) -> Iterator[Engine]:
    """The application's engine, with its tables made by SQLAlchemy."""
    given = parse_dsn(application_url)
    names = {"username": given.pop("user"), "password": given.pop("password", None), "database": given.pop("dbname")}
    engine = create_engine(URL.create("postgresql+psycopg2", **names, query=given))
    shop.Base.metadata.create_all(engine)
    shop.metadata.create_all(engine, tables=[shop.lines])
    yield engine
    engine.dispose()


def add_sessions(engine: Engine, *sessions: shop.Session) -> None:
    with OrmSession(engine) as session:
        session.add_all(sessions)
        session.commit()


def left(engine: Engine) -> list[Any]:
    with OrmSession(engine) as session:
        return list(session.scalars(select(Session.expires).order_by(Session.expires)))


def fields_of(table: object) -> dict[str, Field]:
    fields: dict[str, Field] = model_of(table)._meta.fields
    return fields


def test_stale_rows_of_mapped_class_are_deleted_in_batches(engine: Engine) -> None:
    add_sessions(engine, *(Session(expires=NOW - timedelta(hours=n)) for n in range(5)), Session())

    sweep = Sweep.on(
        Session,
        name="shop.expired",
        stale=lambda row, now: row.expires <= now,
        order=("expires",),
        action=Delete(),
        batch_size=2,
    )

    assert (run_sweep(sweep).counts["deleted_rows"], left(engine)) == (5, [None])


def test_stale_rows_of_table_with_composite_key_are_deleted(engine: Engine) -> None:
    with engine.begin() as connection:
        rows = [
            {"order_id": 1, "line no": n, "mood": shop.Mood.GLAD, "touched_at": NOW - timedelta(days=n)}
            for n in range(5)
        ]
        connection.execute(insert(shop.lines), rows)

    sweep = Sweep.on(
        shop.lines,
        name="shop.lines",
        always_stale=True,
        stale=lambda row, now: (row.touched_at < NOW - timedelta(days=1)) & (row.mood == shop.Mood.GLAD),
        action=Delete(),
        batch_size=2,
    )

    assert [column.name for column in sweep.order] == ["order_id", "line no"]
    assert run_sweep(sweep).counts["deleted_rows"] == 3
    assert fields_of(shop.lines)["delete_"].column_name == "delete"


def test_fields_have_attribute_names_and_column_types() -> None:
    fields = fields_of(Session)

    assert {name: type(field) for name, field in fields.items() if name != "tags"} == {
        "id": UUIDField,
        "expires": UtcDateTimeField,
        "mood": EnumField,
        "details": JSONField,
        "address": SqlField,
        "seen_at": NaiveUtcDateTimeField,
    }
    assert fields["expires"].column_name == "expires_at"


@pytest.mark.parametrize(
    "stale",
    [
        lambda row, now: row.mood == shop.Mood.SAD,
        lambda row, now: row.mood.in_([shop.Mood.SAD]),
        lambda row, now: row.mood == "SAD",
        lambda row, now: row.details["kind"] == "bot",
        lambda row, now: row.tags.contains("bot"),
        lambda row, now: row.address == "10.0.0.1",
        lambda row, now: row.seen_at <= NOW,
    ],
)
def test_predicate_on_each_column_type_finds_its_rows(engine: Engine, stale: Any) -> None:
    bot = Session(mood=shop.Mood.SAD, details={"kind": "bot"}, tags=["bot"], address="10.0.0.1")
    bot.seen_at = NOW.replace(tzinfo=None)
    add_sessions(engine, Session(expires=NOW), bot)

    result = run_sweep(Sweep.on(Session, name="shop.bots", stale=stale, always_stale=True, action=Delete()))

    assert (result.counts["deleted_rows"], left(engine)) == (1, [NOW])


def test_transition_changes_an_enumeration_stored_by_name(engine: Engine) -> None:
    add_sessions(engine, Session(expires=NOW), Session(expires=NOW, mood=shop.Mood.SAD))
    machine = StateMachine(model_of(Session).mood, shop.Mood, {"cheer": ([shop.Mood.SAD], shop.Mood.GLAD)})

    result = run_sweep(
        Sweep.on(
            Session, name="shop.cheer", stale=lambda row, now: row.expires <= now, action=Transition(machine, "cheer")
        )
    )

    with OrmSession(engine) as session:
        assert set(session.scalars(select(Session.mood))) == {shop.Mood.GLAD}
    assert result.counts["moved_rows"] == 1


def test_wrong_key_of_a_mapped_class_is_rejected_with_what_to_declare(postgres: Database) -> None:
    wrong = Table("sa_reading", MetaData(), Column("id", BigInteger, primary_key=True), Column("at", DateTime(True)))
    postgres.execute_sql("CREATE TABLE sa_reading (id bigint, at timestamptz, PRIMARY KEY (id, at))")
    sweep = Sweep.on(wrong, name="a", stale=lambda row, now: row.at < now, action=Delete())

    with pytest.raises(DeclarationError) as rejected:
        plan(sweep)

    assert str(rejected.value).endswith("are identified by (id, at); declare the primary key (id, at) in sa_reading")


def test_model_has_the_schema_of_the_metadata() -> None:
    table = Table("log", MetaData(schema="audit"), Column("id", primary_key=True))

    meta: Any = model_of(table)._meta
    assert (meta.schema, meta.table_name, type(meta.primary_key)) == ("audit", "log", SqlField)


class Abstract(shop.Base):
    __abstract__ = True


class Joined:
    pass


registry().map_imperatively(
    Joined,
    join(Session.__table__, shop.Person.__table__, shop.Person.__table__.c.kind == "x"),
    properties={
        "id": Session.__table__.c.id,
        "person_id": shop.Person.__table__.c.id,
    },
)


@pytest.mark.parametrize(
    ("table", "said"),
    [
        (
            shop.Guest,
            "Guest shares the table sa_person with Person; declare the sweep on that class, with sa_person.kind",
        ),
        (
            shop.Member,
            r"Member are in several tables \(sa_person, sa_member\); .* pass one of them, such as Member.__t",
        ),
        (Joined, "the rows of Joined are in several tables"),
        (Abstract, "is no table; it should be a Django model, a SQLAlchemy Table or mapped class, or a model derived"),
        (DeclarativeBase, "is no table"),
        (Enum, "is no table"),
        (shop.keyless, "keyless has no primary key; a sweep needs one"),
    ],
)
def test_class_without_a_single_table_is_rejected(table: object, said: str) -> None:
    with pytest.raises(DeclarationError, match=said):
        model_of(table)


def test_table_has_one_model_for_all_sweeps() -> None:
    assert model_of(shop.lines) is model_of(shop.lines)
    assert model_of(model_of(shop.lines)) is model_of(shop.lines)


def test_text_column_has_a_text_field() -> None:
    assert type(fields_of(shop.lines)["delete_"]) is TextField
