"""What the catalog knows of a schema, so that two ways to create it can be compared."""

from __future__ import annotations

from typing import Any, Final

from psycopg2.extensions import connection as Connection

#: Every property that statements of migrations set. Objects are named, because their oids differ.
_QUERY: Final = """
WITH tables AS (SELECT * FROM pg_class WHERE relnamespace = to_regnamespace(quote_ident(%(name)s)))
SELECT 'relation', relname, relkind::text, reloptions::text, obj_description(oid, 'pg_class') FROM tables
UNION ALL
SELECT 'column', relname, format('%%s %%s %%s %%s', attnum, attname, format_type(atttypid, atttypmod), attidentity),
    format('%%s %%s', attnotnull, pg_get_expr(adbin, adrelid)), col_description(attrelid, attnum)
FROM pg_attribute JOIN tables ON tables.oid = attrelid LEFT JOIN pg_attrdef ON adrelid = attrelid AND adnum = attnum
WHERE attnum > 0 AND relkind = 'r'
UNION ALL
SELECT 'constraint', relname, conname, pg_get_constraintdef(pg_constraint.oid), NULL
FROM pg_constraint JOIN tables ON tables.oid = conrelid
UNION ALL
SELECT 'index', relname, pg_get_indexdef(indexrelid), NULL, NULL FROM pg_index JOIN tables ON tables.oid = indexrelid
ORDER BY 1, 2, 3
"""


def description(admin: Connection, name: str) -> list[tuple[Any, ...]]:
    """Return the relations, columns, constraints and indexes of a schema, and the applied migrations."""
    with admin.cursor() as cursor:
        cursor.execute(_QUERY, {"name": name})
        found: list[tuple[Any, ...]] = cursor.fetchall()
        if any(each[:2] == ("relation", "migrations") for each in found):
            cursor.execute(f'SELECT version FROM "{name}".migrations ORDER BY version')
            found += cursor.fetchall()
        return found
