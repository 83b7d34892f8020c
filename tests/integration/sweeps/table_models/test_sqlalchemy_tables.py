"""Sweeps on SQLAlchemy tables and mapped classes: names, types, keys, and classes that a sweep cannot take."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from enum import Enum
from typing import Any

import pytest
from peewee import Field, JSONField, UUIDField
from psycopg2.extensions import parse_dsn
from sqlalchemy import BigInteger, Column, DateTime, Engine, MetaData, Table, create_engine, insert, join, select
from sqlalchemy.engine import URL
from sqlalchemy.orm import DeclarativeBase, registry
from sqlalchemy.orm import Session as OrmSession

from housekeeping import Delete, Guard, Limits, Rows, StateMachine, Sweep, TableStage, Transition, UtcDateTimeField
from tests.declarations import stage_of
from tests.integration.sweeps.table_models import sqlalchemy_shop as shop
from tests.internals.core import DeclarationError
from tests.internals.database import Database, NaiveUtcDateTimeField
from tests.internals.engine import run_sweep
from tests.internals.sweeps import EnumField, SqlField, model_of

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

    sweep = Sweep(
        "shop.expired",
        Rows(Session, stale=lambda row, now: row.expires <= now, order=("expires",), action=Delete()),
        limits=Limits(batch=2, batch_takes=None),
    )

    assert (run_sweep(sweep).counts["deleted_rows"], left(engine)) == (5, [None])


def test_stale_rows_of_table_with_composite_key_are_deleted(engine: Engine) -> None:
    with engine.begin() as connection:
        rows = [
            {"order_id": 1, "line no": n, "mood": shop.Mood.GLAD, "touched_at": NOW - timedelta(days=n)}
            for n in range(5)
        ]
        connection.execute(insert(shop.lines), rows)

    sweep = Sweep(
        "shop.lines",
        Rows(
            shop.lines,
            stale=lambda row: (row.touched_at < NOW - timedelta(days=1)) & (row.mood == shop.Mood.GLAD),
            action=Delete(),
        ),
        limits=Limits(batch=2, batch_takes=None),
    )

    assert [column.name for column in stage_of(sweep).order] == ["order_id", "line no"]
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
        lambda row: row.mood == shop.Mood.SAD,
        lambda row: row.mood.in_([shop.Mood.SAD]),
        lambda row: row.mood == "SAD",
        lambda row: row.details["kind"] == "bot",
        lambda row: row.tags.contains("bot"),
        lambda row: row.address == "10.0.0.1",
        lambda row: row.seen_at <= NOW,
    ],
)
def test_predicate_on_each_column_type_finds_its_rows(engine: Engine, stale: Any) -> None:
    bot = Session(mood=shop.Mood.SAD, details={"kind": "bot"}, tags=["bot"], address="10.0.0.1")
    bot.seen_at = NOW.replace(tzinfo=None)
    add_sessions(engine, Session(expires=NOW), bot)

    result = run_sweep(Sweep("shop.bots", Rows(Session, stale=stale, action=Delete())))

    assert (result.counts["deleted_rows"], left(engine)) == (1, [NOW])


def test_transition_changes_an_enumeration_stored_by_name(engine: Engine) -> None:
    add_sessions(engine, Session(expires=NOW), Session(expires=NOW, mood=shop.Mood.SAD))
    machine = StateMachine(model_of(Session).mood, shop.Mood, {"cheer": ([shop.Mood.SAD], shop.Mood.GLAD)})

    result = run_sweep(
        Sweep(
            "shop.cheer", Rows(Session, stale=lambda row, now: row.expires <= now, action=Transition(machine, "cheer"))
        )
    )

    with OrmSession(engine) as session:
        assert set(session.scalars(select(Session.mood))) == {shop.Mood.GLAD}
    assert result.counts["moved_rows"] == 1


def test_order_has_the_key_of_the_table_whatever_the_metadata_declares(postgres: Database) -> None:
    wrong = Table("sa_reading", MetaData(), Column("id", BigInteger, primary_key=True), Column("at", DateTime(True)))
    postgres.execute_sql("CREATE TABLE sa_reading (id bigint, at timestamptz, PRIMARY KEY (id, at))")
    sweep = Sweep("a", Rows(wrong, stale=lambda row, now: row.at < now, action=Delete()))

    (stage,) = sweep.stages_for_run()

    assert isinstance(stage, TableStage)
    assert [column.column_name for column in stage.order] == ["id", "at"]


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
        (Abstract, "is no table; it should be a Django model, a SQLAlchemy Table or mapped class, a model derived"),
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


def test_table_that_is_given_by_its_name_is_read_from_the_catalog(postgres: Database) -> None:
    postgres.execute_sql("CREATE TABLE named (tenant int, id bigint, at timestamptz, PRIMARY KEY (tenant, id))")
    postgres.execute_sql("INSERT INTO named SELECT 1, n, now() - interval '1 day' * n FROM generate_series(0, 5) AS n")
    sweep = Sweep(
        "shop.named",
        Rows("named", stale=lambda row, now: row.at < now, order="at", age=timedelta(days=2), action=Delete()),
        limits=Limits(batch=2, batch_takes=None),
        guard=Guard(first_run=False),
    )

    assert sweep.known_stages() == ()
    assert run_sweep(sweep).counts["deleted_rows"] == 4
    assert [column.name for column in stage_of(sweep).order] == ["at", "tenant", "id"]
    with pytest.raises(
        DeclarationError, match="shop.named: stale reads row.seen_at, but named has no column 'seen_at'"
    ):
        Sweep("shop.named", Rows("named", stale=lambda row, now: row.seen_at < now, action=Delete())).stages_for_run()
    with pytest.raises(DeclarationError, match="there is no table 'nowhere'"):
        Sweep("shop.named", Rows("nowhere", stale=lambda row, now: row.at < now, action=Delete())).stages_for_run()


@pytest.mark.parametrize("copies", [0, 1], ids=["as declared", "set up after it was checked"])
def test_predicate_on_a_named_table_is_checked_where_it_is_used(postgres: Database, copies: int) -> None:
    postgres.execute_sql("CREATE TABLE named (id bigint PRIMARY KEY, at timestamptz, kind text)")
    stale = [lambda row, now: row.at < now, lambda row, now: (row.at < now) & row.kind != "kept"]
    sweep = Sweep("shop.named", Rows("named", stale=lambda row, now: stale[0](row, now), action=Delete()))
    for _ in range(copies):
        sweep.stages_for_run()
        sweep = sweep.set_up(enabled=True)
    del stale[0]

    with pytest.raises(DeclarationError, match="applies & to row.kind"):
        sweep.stages_for_run()
