"""SQLAlchemy's tables and mapped classes as descriptions. Imported only where SQLAlchemy is imported already."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any, Final

from sqlalchemy import Column, Enum, Table
from sqlalchemy.dialects import postgresql
from sqlalchemy.exc import CompileError
from sqlalchemy.orm import RelationshipDirection, class_mapper
from sqlalchemy.orm.exc import UnmappedClassError

from housekeeping.core.errors import DeclarationError
from housekeeping.sweeps.tables import OrmRule, TableColumn, TableDescription

_DIALECT: Final = postgresql.dialect()


def describe(table: object) -> TableDescription | None:
    """Return the description of a table, or of a mapped class's table; None if it is neither.

    Raises:
      DeclarationError: When the class's rows are in several tables, or share a table with those of other classes.
    """
    if isinstance(table, Table):
        return _described(table.name, table, table.columns.items(), table.primary_key.columns)
    if not isinstance(table, type):
        return None
    try:
        mapper: Any = class_mapper(table, configure=False)
    except UnmappedClassError:
        return None
    name = table.__name__
    if mapper.single:
        raise DeclarationError(
            f"{name} shares the table {mapper.local_table.name} with {mapper.inherits.class_.__name__}; declare the "
            f"sweep on that class, with {mapper.polymorphic_on} in its predicate"
        )
    tables = [str(each.name) for each in mapper.tables]
    if len(tables) > 1 or not isinstance(mapper.local_table, Table):
        raise DeclarationError(
            f"the rows of {name} are in several tables ({', '.join(tables)}); a sweep goes through one table: pass one "
            f"of them, such as {name}.__table__, with an action that changes the others"
        )
    return _described(name, mapper.local_table, mapper.columns.items(), mapper.primary_key)


def rules(declared: Iterable[object]) -> Iterator[OrmRule]:
    """Yield what each relationship to dependents does, of all classes that are mapped beside the declared ones."""
    registries = {}
    for table in declared:
        if isinstance(table, type):
            with suppress(UnmappedClassError):
                mapper: Any = class_mapper(table)
                registries[id(mapper.registry)] = mapper.registry
    for mapper in [mapper for each in registries.values() for mapper in each.mappers]:
        for relation in mapper.relationships:
            decision = _decision(relation)
            if decision is not None:
                columns = tuple(str(remote.name) for _, remote in relation.local_remote_pairs)
                how = f"cascade={str(relation.cascade)!r}".replace("CascadeOptions(", "").replace(")", "")
                text = f"SQLAlchemy's {mapper.class_.__name__}.{relation.key} has {how}"
                yield OrmRule(str(relation.mapper.local_table.name), columns, decision, text)


def _decision(relation: Any) -> str | None:
    if relation.direction is not RelationshipDirection.ONETOMANY or relation.viewonly:
        return None
    if relation.cascade.delete:
        return "delete"
    # Without a cascade SQLAlchemy sets the column to NULL, unless it leaves that to the database.
    return None if relation.passive_deletes else "clear"


def _described(
    label: str, table: Table, columns: Iterable[tuple[str, Any]], key: Iterable[Column[Any]]
) -> TableDescription:
    # A mapped class may have computed expressions among its columns.
    own = [(name, column) for name, column in columns if isinstance(column, Column) and column.table is table]
    return TableDescription(
        str(label),
        table.schema and str(table.schema),
        str(table.name),
        [
            TableColumn(name, str(column.name), _sql_type(column), bool(column.nullable), _labels(column.type))
            for name, column in own
        ],
        [str(column.name) for column in key],
    )


def _sql_type(column: Column[Any]) -> str:
    try:
        return column.type.compile(dialect=_DIALECT)
    except CompileError:  # a type that was not said, or not known when the table was reflected
        return ""


def _labels(kind: object) -> dict[Any, str]:
    if not isinstance(kind, Enum) or kind.enum_class is None:
        return {}
    members = list(zip(kind.enum_class, kind.enums, strict=False))
    return {**{member.value: label for member, label in members}, **dict(members)}
