"""Why a partition stays although its range is over."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from peewee import SQL, Context, Entity, Expression, Field, Model, Node

from housekeeping.database.catalog import table_if_visible
from housekeeping.database.connection import database, sqlstate
from housekeeping.sweeps.checks.statements import Recorder
from housekeeping.sweeps.partitions.catalog import Partition

_STATEMENT_TIMEOUT: Final = "57014"

#: Foreign keys, a view, and another object that uses the partition: a function, or a table with a column of its type.
_DEPENDENTS: Final = """
SELECT (
    SELECT json_agg(json_build_array(
        conname, conrelid::regclass::text, conparentid = 0,
        ARRAY(SELECT quote_ident(attname) FROM unnest(conkey) WITH ORDINALITY AS one (number, place)
              JOIN pg_attribute ON attrelid = conrelid AND attnum = number ORDER BY place),
        ARRAY(SELECT quote_ident(attname) FROM unnest(confkey) WITH ORDINALITY AS one (number, place)
              JOIN pg_attribute ON attrelid = confrelid AND attnum = number ORDER BY place)
    ) ORDER BY conrelid::regclass::text, conname)
    FROM pg_constraint WHERE contype = 'f' AND confrelid = partition.oid
), (
    SELECT min(ev_class::regclass::text) FROM pg_depend JOIN pg_rewrite ON pg_rewrite.oid = objid
    WHERE classid = 'pg_rewrite'::regclass AND refclassid = 'pg_class'::regclass AND refobjid = partition.oid
        AND ev_class <> refobjid
), (
    SELECT min(pg_describe_object(classid, objid, objsubid)) FROM pg_depend
    WHERE deptype = 'n' AND classid IN ('pg_proc'::regclass, 'pg_class'::regclass) AND (
        (refclassid = 'pg_class'::regclass AND refobjid = partition.oid)
        OR (refclassid = 'pg_type'::regclass AND refobjid = reltype)
    )
)
FROM pg_class AS partition WHERE oid = %s
"""


@dataclass(frozen=True, slots=True)
class Keeping:
    """Condition of rows that keep their partition.

    Attributes:
      rows: The condition.
      why: The reason, such as ``a row is on hold``.
    """

    rows: Any
    why: str


def reason_of_catalog(partition: Partition, *, drops: bool) -> str | None:
    """Return why PostgreSQL would refuse to detach or drop the partition; None if nothing prevents it.

    Parameters:
      drops: Whether the partition is dropped. Detaching it is possible although a view or a function uses it, or a
        foreign key names it.
    """
    if partition.is_foreign:
        return "it is a foreign table"
    row: Any = database.execute_sql(_DEPENDENTS, (partition.id,)).fetchone()
    references, view, dependent = row or (None, None, None)
    for name, table, is_direct, columns, referenced in references or ():
        if is_direct and drops:
            return f"the foreign key {name} of {table} refers to it"
        joined = " AND ".join(f"one.{a} = other.{b}" for a, b in zip(columns, referenced, strict=True))
        sql = f"SELECT 1 FROM {table} AS one JOIN {partition.name} AS other ON {joined} LIMIT 1"  # noqa: S608
        if _is_found(sql.replace("%", "%%")):
            return f"rows of {table} refer to it (foreign key {name})"
    if not drops:
        return None
    if view is not None:
        return f"the view {view} reads it"
    return f"{dependent} depends on it" if dependent is not None else None


def reason_of_rows(model: type[Model], partition: Partition, conditions: Sequence[Keeping]) -> str | None:
    """Return why the rows of the partition keep it; None if no row does. Requires a transaction."""
    if conditions:
        # The bounds of the partition decide most comparisons with its time, without reading it.
        database.execute_sql("SELECT set_config('constraint_exclusion', 'on', true)")
    for each in conditions:
        query: Any = model.select(SQL("1")).from_(_Rows(model, partition.name)).where(each.rows).limit(1)
        sql, parameters = database.get_sql_context().sql(query).query()
        if _is_found(sql, parameters):
            return each.why
    return None


def is_too_slow(error: BaseException) -> bool:
    """Return whether PostgreSQL ended a statement because it took too long."""
    return sqlstate(error) == _STATEMENT_TIMEOUT


def fails(condition: Any, column: str) -> Any:
    """Return the condition of the rows that do not match `condition`, including those where it is NULL.

    A plain NOT can use an index, and PostgreSQL can disprove it by the bounds of a partition. It is enough if the
    condition cannot be NULL.

    Parameters:
      column: The partition key, which is NULL only in the DEFAULT partition.
    """
    return _Not(condition, or_null=not isinstance(condition, Expression) or _may_be_null(condition, column))


def _may_be_null(condition: Any, column: str) -> bool:
    recorder = Recorder()
    recorder.sql(condition)
    return bool(recorder.models) or any(_is_nullable(field, column) for field in recorder.fields)


def _is_nullable(field: Field, column: str) -> bool:
    return field.column_name != column and field.column_name not in table_if_visible(field.model).not_null


def _is_found(sql: str, parameters: Any = None) -> bool:
    return database.execute_sql(sql, parameters).fetchone() is not None


class _Not(Node):
    """Negation in SQL; NULL counts as false if it can be."""

    def __init__(self, condition: Any, *, or_null: bool) -> None:
        self._condition = condition
        self._or_null = or_null

    def __sql__(self, ctx: Context) -> Any:
        context: Any = ctx
        context.literal("((" if self._or_null else "(NOT (").sql(self._condition)
        return context.literal(") IS NOT TRUE)" if self._or_null else "))")


class _Rows(Node):
    """One partition in the place of the model's table, under the alias that the model's columns have."""

    def __init__(self, model: type[Model], name: str) -> None:
        meta: Any = model._meta
        self._table = meta.table
        self._name = name

    def __sql__(self, ctx: Context) -> Any:
        context: Any = ctx
        alias = context.alias_manager[self._table]
        return context.literal(f"{self._name.replace('%', '%%')} AS ").sql(Entity(alias))
