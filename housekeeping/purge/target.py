"""The table of a purge, read from the catalog, as a model."""

from __future__ import annotations

from typing import Any, Final

from peewee import Model, PeeweeException

from housekeeping.core.errors import WrongArgument
from housekeeping.core.sanitize import error_line
from housekeeping.database.connection import database, sqlstate
from housekeeping.sweeps.ledger.models import Run
from housekeeping.sweeps.table_models.columns import Column, TableDescription, build_model

_READ: Final = """
SELECT nspname::text, relname::text, relkind::text, (
    SELECT json_agg(json_build_array(attname, format_type(atttypid, atttypmod), NOT attnotnull) ORDER BY attnum)
    FROM pg_attribute WHERE attrelid = pg_class.oid AND attnum > 0 AND NOT attisdropped
), (
    SELECT json_agg(attname ORDER BY place)
    FROM pg_index, unnest(indkey::smallint[]) WITH ORDINALITY AS key (number, place)
    JOIN pg_attribute ON attnum = number
    WHERE indrelid = pg_class.oid AND indisprimary AND attrelid = pg_class.oid AND place <= indnkeyatts
)
FROM pg_class JOIN pg_namespace ON pg_namespace.oid = relnamespace WHERE pg_class.oid = to_regclass(%s)
"""
_TABLES: Final = ("r", "p")
_KINDS: Final = {"v": "a view", "m": "a materialized view", "f": "a foreign table", "S": "a sequence", "i": "an index"}
_SYSTEM: Final = ("pg_catalog", "information_schema", "pg_toast")
_NOT_A_NAME: Final = ("42601", "42602", "0A000")  # SQLSTATEs of to_regclass


def model_of_table(name: str) -> type[Model]:
    """Return the model of a table in the current database. Its statements call the table by its name, without a schema.

    Raises:
      WrongArgument: There is no such table, it has no primary key, or it belongs to PostgreSQL or to the library.
      peewee.PeeweeException: The catalog cannot be read.
    """
    schema, table, kind, columns, key = _row_of(name)
    if kind not in _TABLES:
        raise WrongArgument(f"{name} is {_KINDS.get(kind, 'no table')}; name a table")
    if schema in _SYSTEM:
        raise WrongArgument(f"{name} is a table of PostgreSQL itself")
    if schema == Run._meta.schema:
        raise WrongArgument(f"{name} is one of the library's own tables; housekeeping.old_runs removes its old rows")
    if not key:
        raise WrongArgument(f"{name} has no primary key, which a purge needs to continue after any row")
    for part in (schema, table, *(column for column, *_ in columns)):
        if "%" in part:  # the driver would take it for a parameter
            raise WrongArgument(f"{name} has a percent sign in the name {part!r}, which is not supported")
    described = TableDescription(
        table, schema, table, [Column(each, each, kind, null) for each, kind, null in columns], key
    )
    model = build_model(described)
    meta: Any = model._meta
    # So that a WHERE can name the table in a subquery: orders.session_id = sessions.id.
    meta.table._alias = table
    return model


def _row_of(name: str) -> tuple[str, str, str, list[tuple[str, str, bool]], list[str]]:
    try:
        row: Any = database.execute_sql(_READ, (name,)).fetchone()
    except PeeweeException as error:
        if sqlstate(error) not in _NOT_A_NAME:
            raise
        raise WrongArgument(f"{name!r} is no name of a table: {error_line(error)}") from None
    if row is None:
        raise WrongArgument(f"there is no table {name!r}; write it as in SQL, with its schema if it needs one")
    found: tuple[str, str, str, list[tuple[str, str, bool]], list[str]] = row
    return found
