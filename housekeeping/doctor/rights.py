"""Which rights on the application's tables the workers need, as they are and as GRANT statements."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping

from housekeeping.foundation.db import database
from housekeeping.foundation.settings import Settings
from housekeeping.workers import families


def needed_rights(settings: Settings) -> dict[str, tuple[str, ...]]:
    """Table, by the name it was declared with -> the rights the workers need on it."""
    return {name: rights for family in families(settings) for name, rights in family.rights.items()}


def missing_rights(table: str, needed: tuple[str, ...]) -> list[str]:
    """Those that the current user does not have; a right on some columns is asked for column by column."""
    return [right for right in needed if not _has(table, right)]


def updated_columns(rights: Iterable[str]) -> set[str]:
    """Return the columns that these rights name."""
    return {column for right in rights for column in _parts(right)[1]}


def grants(role: str, rights: Mapping[str, tuple[str, ...]]) -> Iterator[str]:
    """The statements that give a role these rights."""
    for table, needed in rights.items():
        yield f"GRANT {', '.join(needed)} ON {table} TO {role}"


def _has(table: str, right: str) -> bool:
    kind, columns = _parts(right)
    if not columns:
        row = database.execute_sql("SELECT has_table_privilege(%s, %s)", (table, kind)).fetchone()
        return bool(row[0])
    # Of the columns that are there: a missing one is no matter of rights, and PostgreSQL would raise for it.
    row = database.execute_sql(
        "SELECT coalesce(bool_and(has_column_privilege(attrelid, attnum, %s)), true) FROM pg_attribute "
        "WHERE attrelid = to_regclass(%s) AND attname = ANY (%s) AND NOT attisdropped",
        (kind, table, columns),
    ).fetchone()
    return bool(row[0])


def _parts(right: str) -> tuple[str, list[str]]:
    found = re.fullmatch(r"(\w+)(?: \((.*)\))?", right)
    assert found is not None
    return found[1], [] if found[2] is None else found[2].split(", ")
