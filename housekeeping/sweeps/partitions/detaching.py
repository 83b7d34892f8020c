"""Statements that detach, attach and drop a partition, with a limit on each wait for a lock."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Final

from housekeeping.database.connection import database, sqlstate
from housekeeping.sweeps.partitions.catalog import Partition, PartitionedTable

#: SQLSTATEs of an attempt that met other sessions: lock timeout, statement timeout, deadlock, and a partition of the
#: table that is just being detached.
_BUSY: Final = ("55P03", "57014", "40P01", "55000")
#: SQLSTATE of a table that does not exist, or is no longer a partition.
_GONE: Final = "42P01"
#: SQLSTATEs of an object that still refers to the partition: a foreign key, a dependent view or function.
_REFERRED: Final = ("23503", "2BP01", "23001")

#: Advisory lock of a table. Its holder may mark and detach a partition.
_ALONE: Final = "hashtextextended('housekeeping partitions of ' || %s, 0)"
#: The limit of each wait for a lock so far, and a new one.
_LIMIT: Final = "current_setting('lock_timeout'), set_config('lock_timeout', %s,"
_SIZE: Final = """
SELECT sum(pg_total_relation_size(each))::bigint
FROM (SELECT %s::oid AS each UNION SELECT relid FROM pg_partition_tree(%s::oid::regclass)) AS parts
"""


def is_busy(error: BaseException) -> bool:
    """Return whether the attempt failed because of other sessions only, so that a later one may succeed."""
    return sqlstate(error) in _BUSY


def is_gone(error: BaseException) -> bool:
    """Return whether another session has dropped or detached the partition meanwhile."""
    return sqlstate(error) == _GONE


def is_referred(error: BaseException) -> bool:
    """Return whether another object still refers to the partition."""
    return sqlstate(error) in _REFERRED


@contextmanager
def alone(table: PartitionedTable, lock_timeout: timedelta) -> Iterator[None]:
    """Keep other runs from marking and detaching partitions of the table during the block, in several transactions.

    Limits each wait for a lock in the block. Requires a direct connection, because it locks and sets for the session.
    """
    # If the lock is not granted in time, the statement and with it the setting is rolled back.
    lock = f"SELECT {_LIMIT} false), pg_advisory_lock({_ALONE})"
    before: Any = database.execute_sql(lock, (_milliseconds(lock_timeout), table.name)).fetchone()
    try:
        yield
    finally:
        _execute(f"SELECT {_LIMIT} false), pg_advisory_unlock({_ALONE})", (before[0], table.name))


def be_alone(table: PartitionedTable) -> None:
    """Keep other runs from marking and detaching partitions of the table until the end of the transaction."""
    _execute(f"SELECT pg_advisory_xact_lock({_ALONE})", (table.name,))


def detach_concurrently(table: PartitionedTable, partition: Partition) -> None:
    """Detach the partition without an exclusive lock on the table; PostgreSQL commits in between.

    The statement allows no transaction around it. It waits for the open transactions that use the table.

    Raises:
      peewee.PeeweeException: The partition is attached, or it is pending and `finish_detaching` completes it.
    """
    _execute(_doubled(f"ALTER TABLE {table.name} DETACH PARTITION {partition.name} CONCURRENTLY"))


def finish_detaching(table: PartitionedTable, partition: Partition) -> None:
    """Complete a DETACH CONCURRENTLY that was interrupted, in the open transaction."""
    _execute(_doubled(f"ALTER TABLE {table.name} DETACH PARTITION {partition.name} FINALIZE"))


def detach(table: PartitionedTable, partition: Partition) -> None:
    """Detach the partition in the open transaction, which locks the table until its end."""
    _execute(_doubled(f"ALTER TABLE {table.name} DETACH PARTITION {partition.name}"))


def attach(table: PartitionedTable, partition: Partition) -> None:
    """Attach a detached partition with the bounds that it had."""
    _execute(_doubled(f"ALTER TABLE {table.name} ATTACH PARTITION {partition.name} {partition.bounds}"))


def lock_against_writes(partition: Partition) -> None:
    """Let no other session write to the partition until the end of the transaction; reads are not affected."""
    _execute(_doubled(f"LOCK TABLE {partition.name} IN SHARE ROW EXCLUSIVE MODE"))


def lock_table(table: PartitionedTable) -> None:
    """Take the lock that detaching needs, so that the partition can no longer change."""
    _execute(_doubled(f"LOCK TABLE ONLY {table.name} IN ACCESS EXCLUSIVE MODE"))


def drop(partition: Partition) -> int:
    """Drop the table in the open transaction, and return how many bytes that frees."""
    row: Any = database.execute_sql(_SIZE, (partition.id, partition.id)).fetchone()
    _execute(_doubled(f"DROP TABLE {partition.name}"))
    return int(row[0] or 0)


@contextmanager
def waiting_at_most(lock_timeout: timedelta) -> Iterator[None]:
    """Limit each wait for a lock in the block, which is part of a transaction."""
    limit = f"SELECT {_LIMIT} true)"
    before: Any = database.execute_sql(limit, (_milliseconds(lock_timeout),)).fetchone()
    yield
    # After an error, the transaction or its savepoint is rolled back, and the setting with it.
    _execute(limit, (before[0],))


def _milliseconds(time: timedelta) -> str:
    return str(max(1, round(time.total_seconds() * 1000)))


def _doubled(sql: str) -> str:
    # Names come from the catalog, quoted by PostgreSQL. The driver reads a percent sign as a placeholder.
    return sql.replace("%", "%%")


def _execute(sql: str, parameters: Any = None) -> None:
    database.execute_sql(sql, parameters)
