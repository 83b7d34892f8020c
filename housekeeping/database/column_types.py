"""Columns of a table as a statement that creates the table writes them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from peewee import Model

from housekeeping.database.catalog import quoted_name
from housekeeping.database.connection import database

_READ_COLUMNS: Final = """SELECT attname::text, format_type(atttypid, atttypmod), attnotnull, attgenerated <> '',
    CASE WHEN attgenerated = '' THEN pg_get_expr(adbin, adrelid) END
FROM pg_attribute LEFT JOIN pg_attrdef ON adrelid = attrelid AND adnum = attnum
WHERE attrelid = to_regclass(%s) AND attnum > 0 AND NOT attisdropped ORDER BY attnum
"""


@dataclass(frozen=True, slots=True)
class ColumnType:
    """Column of a table, according to the catalog.

    Attributes:
      sql_type: With its modifier, such as ``numeric(10,2)``.
      generated: Whether PostgreSQL computes it from other columns.
      default: The expression of its default; None if it has none.
    """

    name: str
    sql_type: str
    not_null: bool = False
    generated: bool = False
    default: str | None = None


def read_columns(model: type[Model]) -> tuple[ColumnType, ...]:
    """Read the columns of the model's table, in their order, without a cache; empty without a table.

    Raises:
      peewee.PeeweeException: If the catalog cannot be read.
    """
    return tuple(ColumnType(*row) for row in database.execute_sql(_READ_COLUMNS, (quoted_name(model),)))
