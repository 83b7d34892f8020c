"""A run that ends as done has reached every row that its predicate matches, whatever its keys, NULLs and times."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import Any, Final

import pytest
from peewee import (
    BigIntegerField,
    BlobField,
    CompositeKey,
    DateField,
    DecimalField,
    DoubleField,
    Field,
    FixedCharField,
    IntegerField,
    TextField,
    UUIDField,
)
from psycopg2.extensions import connection as Connection

from housekeeping import BaseModel, Call, Delete, Limits, Rows, Sweep, UtcDateTimeField
from tests.integration.conftest import Plant
from tests.internals.database import Database
from tests.internals.engine import run_sweep
from tests.internals.insight import plan
from tests.internals.ledger import Run


@dataclass(frozen=True)
class Kind:
    """A type of column: how a model declares it, its name in SQL, and an SQL expression for one of many values."""

    field: Callable[..., Field]
    sql: str
    values: tuple[str, ...]


_N: Final = tuple(str(n) for n in range(12))
KINDS: Final = {
    "bigint": Kind(BigIntegerField, "bigint", ("-9223372036854775808", *_N, "9223372036854775807")),
    "text": Kind(TextField, "text", ("''", "'%s'", r"'\\'", "'ß'", "'z'", "'Z'", *(f"'n{n}'" for n in _N))),
    "char": Kind(partial(FixedCharField, max_length=3), "char(3)", tuple(f"'n{n}'" for n in _N)),
    "uuid": Kind(UUIDField, "uuid", tuple(f"'{n:0>8}-0000-4000-8000-{n:0>12}'::uuid" for n in _N)),
    "bytea": Kind(BlobField, "bytea", (r"'\x'::bytea", r"'\x00ff'::bytea", *(rf"'\x0{n}'::bytea" for n in range(9)))),
    "numeric": Kind(
        DecimalField, "numeric", ("'NaN'::numeric", "1e300", "-0.000000000000000000001", *(f"{n} / 7.0" for n in _N))
    ),
    "double": Kind(DoubleField, "double precision", ("'-infinity'::float8", "'NaN'::float8", "0.1", *_N)),
    "timestamptz": Kind(
        UtcDateTimeField,
        "timestamptz",
        (
            "'-infinity'::timestamptz",
            "'infinity'::timestamptz",
            "'0044-03-15 BC'::timestamptz",
            "'0001-01-01 00:00+14'::timestamptz",
            "'99999-12-31'::timestamptz",
            *(f"'2026-01-01 00:00:00.00000{n}+00'::timestamptz" for n in range(9)),
        ),
    ),
    "date": Kind(DateField, "date", ("'-infinity'::date", "'4000-01-01 BC'::date", "'2026-02-28'::date")),
}


def _row_model(table: str, order: Field, key: dict[str, Field]) -> type[BaseModel]:
    class Meta:
        table_name = table
        primary_key = CompositeKey(*key)

    return type("Row", (BaseModel,), {"position": order, **key, "kept": IntegerField(null=True), "Meta": Meta})


#: How a table says what identifies its rows.
TABLES: Final = {
    "primary key": "CREATE TABLE {table} ({columns}, kept integer, PRIMARY KEY ({key}))",
    "reversed key": "CREATE TABLE {table} ({columns}, kept integer, PRIMARY KEY ({reversed_key}))",
    "unique index": "CREATE TABLE {table} ({columns}, kept integer); CREATE UNIQUE INDEX ON {table} ({key})",
    "hash partitions": (
        "CREATE TABLE {table} ({columns}, kept integer, PRIMARY KEY ({key})) PARTITION BY HASH ({key});"
        "CREATE TABLE {table}_0 PARTITION OF {table} FOR VALUES WITH (MODULUS 2, REMAINDER 0);"
        "CREATE TABLE {table}_1 PARTITION OF {table} FOR VALUES WITH (MODULUS 2, REMAINDER 1)"
    ),
}


def _make(
    admin: Connection, table: str, draw: random.Random, order: str, key: dict[str, str], rows: int, nulls: bool
) -> None:
    """Create a table and fill it with random rows: NULLs and equal values in the order column, extreme values."""
    kinds = {"position": KINDS[order], **{name: KINDS[kind] for name, kind in key.items()}}
    columns = ", ".join(
        f"{name} {kind.sql}{'' if nulls and name == 'position' else ' NOT NULL'}" for name, kind in kinds.items()
    )
    names = list(key)
    form = TABLES[draw.choice(sorted(TABLES))]
    create = form.format(table=table, columns=columns, key=", ".join(names), reversed_key=", ".join(names[::-1]))
    with admin.cursor() as cursor:
        cursor.execute(create)
        for _ in range(rows):
            position = "NULL" if nulls and draw.random() < 0.3 else draw.choice(kinds["position"].values)
            given = [position, *(draw.choice(kinds[name].values) for name in key)]
            kept = draw.choice(("NULL", "0", "1"))
            cursor.execute(
                f"INSERT INTO {table} VALUES ({', '.join(given)}, {kept}) ON CONFLICT DO NOTHING".replace("%", "%%")
            )


@pytest.mark.parametrize("seed", [*range(15), *(pytest.param(n, marks=pytest.mark.slow) for n in range(15, 40))])
def test_done_run_leaves_only_rows_that_are_locked_or_rejected(
    postgres: Database, admin: Connection, plant: Plant, seed: int
) -> None:
    draw = random.Random(seed)
    order = draw.choice(sorted(KINDS))
    key = {f"key_{n}": draw.choice(sorted(KINDS)) for n in range(draw.choice((1, 1, 2, 3)))}
    table = f"rows_{seed}"
    _make(admin, table, draw, order, key, rows=60, nulls=draw.random() < 0.8)
    fields = {name: KINDS[kind].field() for name, kind in key.items()}
    # The model may be wrong about NULL.
    model: Any = _row_model(table, KINDS[order].field(null=draw.random() < 0.5), fields)
    rejected = draw.random() < 0.5
    if rejected:
        plant(f"DELETE ON {table}", "OLD.kept = 1", "RAISE EXCEPTION 'kept'")
    sweep = Sweep(
        f"shop.rows_{seed}",
        Rows(
            model,
            stale=lambda row: row.kept.is_null() | (row.kept > 0),
            order=("position", *draw.sample(list(key), len(key))),
            action=draw.choice((Delete(), Call(lambda row: None, then=Delete()))),
        ),
        limits=Limits(batch=draw.choice((1, 3, 7)), batch_takes=None),
    )
    planned = plan(sweep)
    bad = int(_one(postgres, f"SELECT count(*) FROM {table} WHERE kept = 1")) if rejected else 0

    stopping = threading.Event()
    if draw.random() < 0.5:
        # Begins somewhere in the middle, and whatever was before it becomes stale.
        run_sweep(sweep, stopping=stopping, on_batch=lambda counts: stopping.set())
    result = run_sweep(sweep)

    left = int(_one(postgres, f"SELECT count(*) FROM {table} WHERE kept IS NULL OR kept > 0"))
    assert (result.outcome, left) == ("done", bad)
    assert planned.stale.rows - left == sum(_counted(sweep.name))


def _one(postgres: Database, query: str) -> Any:
    return postgres.execute_sql(query).fetchone()[0]


def _counted(worker: str) -> list[int]:
    return [run.counts["deleted_rows"] for run in Run.select().where(Run.worker == worker)]


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_run_over_a_key_of_any_type_tries_each_row_once(
    postgres: Database, admin: Connection, plant: Plant, kind: str
) -> None:
    with admin.cursor() as cursor:
        cursor.execute(f"CREATE TABLE keyed (id {KINDS[kind].sql} PRIMARY KEY)")
        for value in KINDS[kind].values:
            cursor.execute(f"INSERT INTO keyed VALUES ({value}) ON CONFLICT DO NOTHING".replace("%", "%%"))
        cursor.execute("CREATE SEQUENCE tries")
    # A sequence keeps its value when a statement is undone.
    plant("DELETE ON keyed", f"OLD.id = {KINDS[kind].values[0]}", "PERFORM nextval('tries'); RAISE EXCEPTION 'kept'")

    class Keyed(BaseModel):
        id = KINDS[kind].field(primary_key=True)

    every = Sweep(
        "shop.keyed",
        Rows(Keyed, stale=lambda row: row.id.is_null(False), action=Delete()),
        limits=Limits(batch=2, batch_takes=None),
    )

    result = run_sweep(every)

    assert (result.outcome, result.counts["failed"]) == ("done", 1), result.reason
    assert _one(postgres, "SELECT count(*) FROM keyed") == 1
    assert _one(postgres, "SELECT last_value FROM tries") == 3, "in its batch, in a transaction, and alone"


def test_times_that_python_lacks_are_read_as_the_nearest_ones(postgres: Database) -> None:
    row = postgres.execute_sql(
        "SELECT '0044-03-15 BC'::timestamptz, '99999-01-01'::timestamptz, '0044-03-15 BC'::timestamp, "
        "'99999-01-01'::date, '0001-01-01 00:00+14'::timestamptz, NULL::timestamptz"
    ).fetchone()

    smallest, largest = datetime.min.replace(tzinfo=UTC), datetime.max.replace(tzinfo=UTC)
    assert row == (smallest, largest, smallest.replace(tzinfo=None), largest.date(), smallest, None)


class Reading(BaseModel):
    """Says that no time is NULL."""

    id = BigIntegerField(primary_key=True)
    at = UtcDateTimeField()


def test_nullable_column_is_read_from_the_catalog_not_the_model(postgres: Database, admin: Connection) -> None:
    with admin.cursor() as cursor:
        cursor.execute("CREATE DOMAIN moment AS timestamptz")
        cursor.execute("CREATE TABLE reading (id bigint PRIMARY KEY, at moment)")
        cursor.execute(
            "INSERT INTO reading SELECT n, CASE WHEN n % 3 > 0 THEN now() END FROM generate_series(1, 30) AS n"
        )
    every = Sweep(
        "shop.readings",
        Rows(Reading, stale=lambda row: row.id > 0, order="at", action=Delete()),
        limits=Limits(batch=4, batch_takes=None),
    )
    planned = plan(every).stale.rows

    result = run_sweep(every)

    assert (planned, result.outcome, result.counts["deleted_rows"]) == (30, "done", 30)
