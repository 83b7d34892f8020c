"""Mark of a partition that is about to be detached: the first line of the table's comment.

DETACH ... CONCURRENTLY commits by itself. If the run is killed before the table is dropped, the next run knows by the
mark which worker detached the table, and from which table. To keep such a table, remove its comment.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Final

from housekeeping.database.connection import database
from housekeeping.sweeps.partitions.catalog import Partition, PartitionedTable

_PREFIX: Final = "housekeeping drops this table: "

#: Marked tables that are no longer partitions.
_DETACHED: Final = """
SELECT pg_class.oid::bigint, format('%%I.%%I', nspname, relname), relkind = 'f', description,
    (SELECT coalesce(sum(pg_total_relation_size(each)), 0)::bigint
     FROM (SELECT pg_class.oid AS each UNION SELECT relid FROM pg_partition_tree(pg_class.oid)) AS parts)
FROM pg_description JOIN pg_class ON pg_class.oid = objoid JOIN pg_namespace ON pg_namespace.oid = relnamespace
WHERE classoid = 'pg_class'::regclass AND objsubid = 0 AND description LIKE %s AND NOT relispartition
ORDER BY 2
"""
_CURRENT: Final = """
SELECT relispartition, obj_description(oid, 'pg_class') FROM pg_class WHERE oid = %s AND oid = to_regclass(%s)
"""


@dataclass(frozen=True, slots=True)
class Mark:
    """Content of a mark.

    Attributes:
      worker: The worker that drops the table. Another one may keep detached tables.
      table: The partitioned table, quoted for SQL.
      bounds: The bounds that the partition had.
      comment: The table's own comment.
    """

    worker: str
    table: str
    bounds: str
    comment: str | None

    def __str__(self) -> str:
        content = json.dumps({"worker": self.worker, "partition_of": self.table, "bounds": self.bounds})
        return f"{_PREFIX}{content}" + ("" if self.comment is None else f"\n{self.comment}")


def mark_of(comment: str | None) -> Mark | None:
    """Return the mark in a table's comment; None without one."""
    if comment is None or not comment.startswith(_PREFIX):
        return None
    first, _, own = comment.removeprefix(_PREFIX).partition("\n")
    try:
        content = json.loads(first)
        return Mark(content["worker"], content["partition_of"], content["bounds"], own or None)
    except (ValueError, KeyError, TypeError):
        return None


def set_mark(worker: str, table: PartitionedTable, partition: Partition) -> None:
    """Mark the partition, unless it has a mark already."""
    current = current_comment(partition)
    if current is not None and mark_of(current[1]) is None:
        _set_comment(partition.name, str(Mark(worker, table.name, partition.bounds, current[1])))


def remove_mark(name: str, comment: str | None) -> None:
    """Restore the table's own comment."""
    mark = mark_of(comment)
    if mark is not None:
        _set_comment(name, mark.comment)


def detached_from(table: PartitionedTable) -> list[tuple[Partition, Mark]]:
    """Return the tables that interrupted runs have detached from the table and neither dropped nor released."""
    found = []
    for id, name, is_foreign, comment, size in database.execute_sql(_DETACHED, (f"{_PREFIX}%",)).fetchall():
        mark = mark_of(comment)
        if mark is not None and mark.table == table.name:
            lower, upper = table.range_of(mark.bounds)
            partition = Partition(id, name, mark.bounds, False, is_foreign, comment, lower, upper, None, size)
            found.append((partition, mark))
    return found


def current_comment(partition: Partition) -> tuple[bool, str | None] | None:
    """Return whether the table is a partition now, and its comment; None if the table is gone."""
    row: Any = database.execute_sql(_CURRENT, (partition.id, partition.name)).fetchone()
    return None if row is None else (bool(row[0]), row[1])


def _set_comment(name: str, comment: str | None) -> None:
    # Names are quoted by PostgreSQL; a percent sign is doubled, because the driver fills in the parameter.
    database.execute_sql(f"COMMENT ON TABLE {name.replace('%', '%%')} IS %s", (comment,))
