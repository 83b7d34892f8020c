"""Which rights on the application's tables the workers need, as they are and as GRANT statements."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from housekeeping.foundation.db import database
from housekeeping.foundation.settings import Settings
from housekeeping.workers import families


def needed_rights(settings: Settings) -> dict[str, tuple[str, ...]]:
    """Table, by the name it was declared with -> the rights the workers need on it."""
    return {name: rights for family in families(settings) for name, rights in family.rights.items()}


def missing_rights(table: str, needed: tuple[str, ...]) -> list[str]:
    """Those that the current user does not have; a right on some columns is asked for column by column."""
    return [right for right in needed if not _has(table, right)]


def grants(role: str, rights: Mapping[str, tuple[str, ...]]) -> Iterator[str]:
    """The statements that give a role these rights."""
    for table, needed in rights.items():
        yield f"GRANT {', '.join(needed)} ON {table} TO {role}"


def _has(table: str, right: str) -> bool:
    kind, columns = _parts(right)
    if not columns:
        row = database.execute_sql("SELECT has_table_privilege(%s, %s)", (table, kind)).fetchone()
        return bool(row[0])
    asked = " AND ".join(["has_column_privilege(%s, %s, %s)"] * len(columns))
    values = [value for column in columns for value in (table, column, kind)]
    return bool(database.execute_sql(f"SELECT {asked}", values).fetchone()[0])


def _parts(right: str) -> tuple[str, list[str]]:
    found = re.fullmatch(r"(\w+)(?: \((.*)\))?", right)
    assert found is not None
    return found[1], [] if found[2] is None else found[2].split(", ")
