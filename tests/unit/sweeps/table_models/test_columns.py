"""Models of described tables: the field for each type of column, names, and keys."""

from __future__ import annotations

from typing import Any

import pytest
from peewee import CompositeKey, Model
from playhouse.postgres_ext import ArrayField

from tests.internals.core import DeclarationError
from tests.internals.database import database
from tests.internals.sweeps import TableColumn, TableDescription, build_model, field_of


def meta_of(model: type[Model]) -> Any:
    return model._meta


def described(*columns: TableColumn, key: tuple[str, ...] = ("id",)) -> TableDescription:
    return TableDescription("Log", "audit", "log", columns, key)


@pytest.mark.parametrize(
    ("sql_type", "field"),
    [
        ("smallint", "SmallIntegerField"),
        ("integer", "IntegerField"),
        ("BIGINT", "BigIntegerField"),
        ("bigserial", "BigIntegerField"),
        ("text", "TextField"),
        ("character varying(30)", "TextField"),
        ('VARCHAR(30) COLLATE "C"', "TextField"),
        ("character(3)", "TextField"),
        ("citext", "TextField"),
        ("timestamp with time zone", "UtcDateTimeField"),
        ("TIMESTAMP(3) WITH TIME ZONE", "UtcDateTimeField"),
        ("timestamp(3) without time zone", "NaiveUtcDateTimeField"),
        ("date", "DateField"),
        ("time without time zone", "TimeField"),
        ("time with time zone", "SqlField"),
        ("numeric(10, 2)", "DecimalField"),
        ("double precision", "DoubleField"),
        ("real", "FloatField"),
        ("boolean", "BooleanField"),
        ("uuid", "UUIDField"),
        ("jsonb", "JSONField"),
        ("bytea", "SqlField"),
        ("inet", "SqlField"),
        ("interval", "SqlField"),
        ("tsrange", "SqlField"),
        ('"Mood"', "SqlField"),
        ("", "SqlField"),
    ],
)
def test_postgres_type_maps_to_its_field(sql_type: str, field: str) -> None:
    assert type(field_of(sql_type, {})).__name__ == field


@pytest.mark.parametrize(
    ("sql_type", "element", "dimensions"),
    [("integer[]", "integer", 1), ("varchar(20)[3]", "varchar", 1), ("TEXT[][]", "TEXT", 2)],
)
def test_array_keeps_the_type_of_its_elements(sql_type: str, element: str, dimensions: int) -> None:
    field = field_of(sql_type, {})

    assert (type(field), field.field_type, field.dimensions) == (ArrayField, element, dimensions)


def test_enumeration_is_compared_by_its_stored_texts() -> None:
    field = field_of("text", {"one": "ONE", "ONE": "TWO"})

    assert [field.db_value(value) for value in ("one", "ONE", "other", None)] == ["ONE", "ONE", "other", None]


def test_model_uses_the_librarys_database_handle() -> None:
    meta = meta_of(build_model(described(TableColumn("id", "id", "bigint", null=False))))

    assert (meta.database, meta.schema, meta.table_name) == (database, "audit", "log")
    assert (meta.primary_key.name, meta.primary_key.primary_key, meta.composite_key) == ("id", True, False)


def test_composite_key_keeps_the_order_of_its_columns() -> None:
    columns = [TableColumn(name, f"the {name}", "bigint", null=False) for name in ("line", "index", "note")]

    meta = meta_of(build_model(described(*columns, key=("the index", "the line"))))

    assert isinstance(meta.primary_key, CompositeKey)
    assert [field.name for field in meta.get_primary_keys()] == ["index_", "line"]


def test_table_without_primary_key_is_rejected() -> None:
    with pytest.raises(
        DeclarationError, match="^Log has no primary key; a sweep needs one, to continue after any row$"
    ):
        build_model(described(TableColumn("id", "id", "bigint", null=False), key=()))


@pytest.mark.parametrize("name", ["select", "delete", "alias", "_meta", "Meta", "DoesNotExist"])
def test_name_of_a_peewee_attribute_gets_an_underscore(name: str) -> None:
    columns = [TableColumn(each, each, "bigint", null=False) for each in ("id", name, f"{name}_")]

    names = [*meta_of(build_model(described(*columns))).fields]

    assert names == ["id", f"{name}_", f"{name}__"]
