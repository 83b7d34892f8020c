"""Definition of an archive's table: the statements that create it, and types that would change values."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from peewee import Model

from housekeeping.database.catalog import quoted_name, read_table
from housekeeping.database.column_types import ColumnType
from housekeeping.database.connection import database
from housekeeping.database.primary_key import declared_key_columns
from housekeeping.sweeps.stages.archive import ARCHIVED_AT, ARCHIVED_BY_RUN

#: Types of the columns that an archive adds.
ADDED_TYPES: Final = {ARCHIVED_AT: "timestamp with time zone", ARCHIVED_BY_RUN: "bigint"}
#: Columns of both tables whose type in the archive is neither the same, nor the same without a limit, nor one that
#: PostgreSQL converts to implicitly. Only an assignment converts to those: it rounds values, or fails on the way back.
_OTHER_TYPES: Final = """SELECT one.attname::text, format_type(two.atttypid, two.atttypmod),
    format_type(one.atttypid, one.atttypmod)
FROM pg_attribute AS one JOIN pg_attribute AS two USING (attname)
WHERE one.attrelid = to_regclass(%s) AND two.attrelid = to_regclass(%s)
AND one.attnum > 0 AND two.attnum > 0 AND NOT one.attisdropped AND NOT two.attisdropped
AND (one.atttypid, one.atttypmod) <> (two.atttypid, two.atttypmod)
AND NOT (two.atttypmod = -1 AND (one.atttypid = two.atttypid OR EXISTS (
    SELECT FROM pg_cast WHERE castsource = one.atttypid AND casttarget = two.atttypid AND castcontext = 'i'
))) ORDER BY one.attnum
"""


@dataclass(frozen=True, slots=True)
class OtherType:
    """Column whose type in the archive would change its values.

    Attributes:
      archived: Its type in the archive.
      stored: Its type in the table.
    """

    name: str
    archived: str
    stored: str


def other_types(source: type[Model], archive: type[Model]) -> list[OtherType]:
    """Return the columns whose type in the archive would change their values.

    Raises:
      peewee.PeeweeException: When the database cannot be asked.
    """
    return [OtherType(*row) for row in database.execute_sql(_OTHER_TYPES, (quoted_name(source), quoted_name(archive)))]


def statements_for(
    source: type[Model], archive: type[Model], columns: Sequence[ColumnType], *, with_index: bool
) -> Iterator[str]:
    """Yield the statements that create an archive.

    Its key begins with the run, for restoring, and the time lets the same row be archived again.

    Parameters:
      with_index: Whether to create an index by age as well.
    """
    meta: Any = archive._meta
    if meta.schema:
        yield f"CREATE SCHEMA IF NOT EXISTS {quoted(meta.schema)}"
    lines = [f"{quoted(column.name)} {column.sql_type}" for column in columns]
    lines += [f"{quoted(name)} {kind} NOT NULL" for name, kind in ADDED_TYPES.items()]
    key = _key_columns(source)
    lines.append(f"PRIMARY KEY ({_listed((ARCHIVED_BY_RUN, ARCHIVED_AT, *key))})")
    yield f"CREATE TABLE {quoted_name(archive)} ({', '.join(lines)})"
    if with_index:
        yield f"CREATE INDEX ON {quoted_name(archive)} ({_listed((ARCHIVED_AT, *key, ARCHIVED_BY_RUN))})"


def missing_key(source: type[Model], archive: type[Model]) -> str | None:
    """Return the statement that adds the key by which rows are restored; None if the archive has one.

    Raises:
      peewee.PeeweeException: When the database cannot be asked.
    """
    key = (ARCHIVED_BY_RUN, ARCHIVED_AT, *_key_columns(source))
    if read_table(archive).is_unique(key):
        return None
    return f"ALTER TABLE {quoted_name(archive)} ADD PRIMARY KEY ({_listed(key)})"


def quoted(name: str) -> str:
    """Return a name, quoted for SQL."""
    return '"' + name.replace('"', '""') + '"'


def _key_columns(source: type[Model]) -> Sequence[str]:
    table, declared = read_table(source), declared_key_columns(source)
    return table.keys[0] if table.keys and not table.is_unique(declared) else declared


def _listed(names: Sequence[str]) -> str:
    return ", ".join(map(quoted, names))
