"""Range partitions of a table: what the catalog says of them, the statements that detach and drop one, and the records
in the ledger of partitions that are being detached.

DETACH ... CONCURRENTLY commits by itself. A record is committed before it. If the run is killed before the table is
dropped, the worker's next run knows by the record that it has to finish.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import MAXYEAR, UTC, datetime, timedelta
from typing import Any, Final, Literal
from uuid import UUID

from peewee import Expression, Model, OperationalError, ProgrammingError

from housekeeping.core.clock import limit_ms
from housekeeping.core.errors import DeclarationError
from housekeeping.database.catalog import (
    escaped,
    foreign_keys_to,
    quoted,
    quoted_name,
    role_without_rows,
    table_if_visible,
)
from housekeeping.database.connection import database, time_limit
from housekeeping.database.errors import is_conflict, is_timeout, sqlstate
from housekeeping.database.queries import Recorder, condition_sql
from housekeeping.ledger.schema import DetachedPartition
from housekeeping.sweeps.keyset import is_not_true, is_nullable

#: ``pending``: a DETACH CONCURRENTLY was interrupted, or is going on. ``detached``: a table of its own, which a worker
#: has detached according to the ledger.
State = Literal["attached", "pending", "detached"]
#: Type of a partition key: how its values represent times.
Key = Literal["time", "uuid7", "epoch_s", "epoch_ms", "text"]
#: Key -> its column types, and SQL for a bound of that type. PostgreSQL converts times, and `_time_of` the others.
_TYPES: Final[dict[Key, dict[str, str]]] = {
    "time": {
        "timestamp with time zone": "{}::timestamptz",
        "timestamp without time zone": "{}::timestamp AT TIME ZONE 'UTC'",
        "date": "{}::date::timestamp AT TIME ZONE 'UTC'",
    },
    "uuid7": {"uuid": "{}"},
    "epoch_s": {"bigint": "{}", "integer": "{}"},
    "epoch_ms": {"bigint": "{}"},
    "text": {"text": "{}", "character varying": "{}", "character": "{}"},
}
#: Largest values of their types, which some tables have instead of MAXVALUE.
_OPEN: Final = ("ffffffff-ffff-ffff-ffff-ffffffffffff", str(2**63 - 1), str(2**31 - 1))
#: An end outside of these years means that the declared key is wrong: milliseconds read as seconds are in the year
#: 55000, seconds read as milliseconds in 1970.
_YEARS: Final = range(1980, 2200)
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MONTH: Final = re.compile(r"(\d{4})(?:-?(\d\d))?", re.ASCII)
#: DETACH ... CONCURRENTLY is new in PostgreSQL 14.
_CONCURRENTLY_SINCE: Final = 140_000

_TABLE: Final = """
SELECT format('%%I.%%I', nspname, relname), partstrat::text, attname::text, format_type(atttypid, NULL), partnatts,
    partdefid <> 0, current_setting('server_version_num')::int
FROM pg_class JOIN pg_namespace ON pg_namespace.oid = relnamespace
LEFT JOIN pg_partitioned_table ON partrelid = pg_class.oid
LEFT JOIN pg_attribute ON attrelid = pg_class.oid AND attnum = partattrs[0]
WHERE pg_class.oid = to_regclass(%s)
"""
#: PostgreSQL 13 has no column inhdetachpending.
_PENDING: Final = "coalesce((to_jsonb(pg_inherits) ->> 'inhdetachpending')::boolean, false)"
_ATTACHED: Final = f"""
SELECT pg_class.oid AS id, format('%%I.%%I', nspname, relname) AS name,
    pg_get_expr(relpartbound, pg_class.oid) AS bounds,
    CASE WHEN {_PENDING} THEN 'pending' ELSE 'attached' END AS state, NULL AS worker
FROM pg_inherits JOIN pg_class ON pg_class.oid = inhrelid JOIN pg_namespace ON pg_namespace.oid = relnamespace
WHERE inhparent = to_regclass(%s)
"""  # noqa: S608 - of a constant
#: A table that was renamed is not the recorded one.
_DETACHED: Final = """
SELECT pg_class.oid AS id, name, bounds, 'detached' AS state, worker
FROM {records} JOIN pg_class ON pg_class.oid = to_regclass(name) AND pg_class.oid::bigint = id
WHERE partition_of = %s AND NOT relispartition
"""
#: A partition may be partitioned itself, and `pg_partition_tree` knows no table that is no partition.
_PARTITIONS: Final = r"""
SELECT id::bigint, name, bounds, state, worker, LOWER, UPPER, (
    SELECT CASE WHEN bool_and(reltuples > 0 OR pg_relation_size(oid) = 0) THEN sum(greatest(reltuples, 0))::bigint END
    FROM pg_class WHERE relkind = 'r' AND oid IN (SELECT one.id UNION SELECT relid FROM pg_partition_tree(one.id))
), (
    SELECT coalesce(sum(pg_total_relation_size(each)), 0)::bigint
    FROM (SELECT one.id AS each UNION SELECT relid FROM pg_partition_tree(one.id)) AS parts
) FROM (FOUND) AS one
"""
_SIZE: Final = "pg_total_relation_size"
#: On the coordinator, a distributed table is empty.
_SHARDS_SIZE: Final = "citus_total_relation_size"
#: The first value of a bound. Only integers are not quoted.
_LOWER: Final = r"btrim(substring(bounds FROM '^FOR VALUES FROM \((''[^'']*''|-?\d+)'), '''')"
_UPPER: Final = r"btrim(substring(bounds FROM ' TO \((''[^'']*''|-?\d+)'), '''')"


@dataclass(slots=True)
class Partition:
    """Partition, or a table that was one, and what a run knows of its work on it.

    Attributes:
      id: Its oid.
      name: Schema and name, quoted for SQL.
      bounds: Its bounds as SQL, such as ``FOR VALUES FROM (...) TO (...)``.
      state: What it was when the run last looked.
      worker: The worker that has detached it and not dropped it; None if it is not detached.
      lower, upper: Its range; `upper` is not part of it. None if open, or for the DEFAULT partition.
      rows: PostgreSQL's estimate; None if never analyzed.
      bytes: Size with indexes and TOAST.
      attempts: How often it was locked by others.
    """

    id: int
    name: str
    bounds: str
    state: State
    worker: str | None
    lower: datetime | None
    upper: datetime | None
    rows: int | None
    bytes: int
    attempts: int = 0

    @property
    def begins(self) -> datetime | None:
        """The beginning of the range, or its end if it has no beginning."""
        return self.lower or self.upper


@dataclass(frozen=True, slots=True)
class PartitionedTable:
    """Table that is partitioned by ranges of time.

    Attributes:
      name: Schema and name, quoted for SQL.
      column: The first column of the partition key.
      kind: Its type.
      key: How its values represent times.
      several_columns: Whether the key has further columns, so that rows may be exactly at the upper bound.
      detaches_concurrently: Whether PostgreSQL can detach its partitions without an exclusive lock on the table.
    """

    name: str
    column: str
    kind: str
    key: Key
    several_columns: bool
    detaches_concurrently: bool
    partitions: tuple[Partition, ...]

    def is_older(self, partition: Partition, limit: datetime) -> bool:
        """Return whether every row of the partition is before the limit."""
        if partition.upper is None:
            return False
        return partition.upper < limit if self.several_columns else partition.upper <= limit

    def warning(self, now: datetime) -> str | None:
        """Return a warning if no partition follows the current one; None if one does, or the last has an open end."""
        ranges = [each for each in self.partitions if each.bounds != "DEFAULT"]
        # An infinite end is read as the latest time of Python.
        if not ranges or any(each.upper is None or each.upper.year == MAXYEAR for each in ranges):
            return None
        last = max(ranges, key=lambda each: each.upper or now)
        if last.lower is not None and last.lower > now:
            return None
        default = next((each.name for each in self.partitions if each.bounds == "DEFAULT"), None)
        fate = "cannot be inserted" if default is None else f"go to {default}, which is never dropped"
        return f"the last partition, {last.name}, ends at {last.upper:%Y-%m-%d %H:%M} UTC; rows after it {fate}"


def read_partitions(model: type[Model], key: Key = "time") -> PartitionedTable:
    """Return the partitions of the model's table.

    Raises:
      DeclarationError: The table is not partitioned by ranges of time, or a range cannot be read as a time.
      peewee.PeeweeException: The catalog cannot be read.
    """
    table = quoted_name(model)
    found: Any = database.execute_sql(_TABLE, (table,)).fetchone()
    if found is None:
        raise DeclarationError(f"there is no table {table}")
    name, strategy, column, kind, columns, has_default, version = found
    if strategy != "r":
        how = {"l": "by list", "h": "by hash"}.get(strategy)
        text = "is not partitioned" if how is None else f"is partitioned {how}"
        raise DeclarationError(f"{table} {text}; DropPartitions needs PARTITION BY RANGE of a time")
    if kind not in _TYPES[key]:
        by = "an expression" if column is None else f"{column} ({kind})"
        others = " or ".join(f'key="{each}"' for each, types in _TYPES.items() if kind in types and each != "time")
        way_out = f"if its values are times, write {others}" if others else "DropPartitions needs a date or a time"
        way_out = "omit key" if kind in _TYPES["time"] else way_out
        given = "" if key == "time" else f', which is not key="{key}"'
        raise DeclarationError(f"{table} is partitioned by {by}{given}; {way_out}")
    # Through a pooler, the settings of a transaction are sent together with its first statement.
    direct = database.prepared() is not None
    # Citus refuses it for distributed tables.
    is_distributed = table_if_visible(model).is_distributed
    concurrently = version >= _CONCURRENTLY_SINCE and not has_default and direct and not is_distributed
    attached = _read(_ATTACHED, kind, key, table, size=_SHARDS_SIZE if is_distributed else _SIZE)
    return PartitionedTable(name, column, kind, key, columns > 1, concurrently, attached)


def detached_from(table: PartitionedTable) -> tuple[Partition, ...]:
    """Return the tables that interrupted runs have detached from the table and not dropped."""
    try:
        with database.atomic():
            return _read(_DETACHED.format(records=_records()), table.kind, table.key, table.name)
    except ProgrammingError:  # before `housekeeping init`, or without a right to the ledger
        return ()


def _read(found: str, kind: str, key: Key, table: str, *, size: str = _SIZE) -> tuple[Partition, ...]:
    lower, upper = _TYPES[key][kind].format(_LOWER), _TYPES[key][kind].format(_UPPER)
    sql = _PARTITIONS.replace(_SIZE, size).replace("LOWER", lower).replace("UPPER", upper).replace("FOUND", found)
    partitions = [Partition(*row) for row in database.execute_sql(sql, (table,)).fetchall()]
    for each in partitions if key != "time" else ():
        begin, end = (None if bound is None or bound in _OPEN else str(bound) for bound in (each.lower, each.upper))
        each.lower = None if begin is None else _time_of(key, begin)
        each.upper = None if end is None else _time_of(key, end)
        if end is not None and (each.upper is None or each.upper.year not in _YEARS):
            read = "cannot be read" if each.upper is None else f"would be the year {each.upper.year}"
            raise DeclarationError(f'the partition {each.name} ends at {end!r}, which {read} with key="{key}"')
    return tuple(sorted(partitions, key=lambda each: (each.upper is None, each.upper, each.name)))


def _time_of(key: Key, value: str) -> datetime | None:
    """Return the time that a value of a partition key represents; None if it is not a valid time in Python."""
    try:
        if key == "uuid7":
            return _EPOCH + timedelta(milliseconds=int(UUID(value).hex[:12], 16))
        if key in ("epoch_s", "epoch_ms"):
            return _EPOCH + int(value) * timedelta(seconds=1 if key == "epoch_s" else 0.001)
        if month := _MONTH.fullmatch(value.strip()):
            return datetime(int(month[1]), int(month[2] or 1), 1, tzinfo=UTC)
        time = datetime.fromisoformat(value.strip())
        return time.astimezone(UTC) if time.tzinfo else time.replace(tzinfo=UTC)
    except (ValueError, OverflowError):
        return None


def record_detachment(worker: str, table: PartitionedTable, partition: Partition) -> None:
    """Record that the worker detaches the partition, in place of the record of another worker's earlier attempt."""
    own: Any = DetachedPartition
    own.insert(
        id=partition.id, name=partition.name, worker=worker, partition_of=table.name, bounds=partition.bounds
    ).on_conflict(conflict_target=[own.id, own.name], preserve=[own.worker, own.partition_of, own.bounds]).execute()


def forget_detachment(partition: Partition) -> None:
    """Remove the record of a partition."""
    same = (DetachedPartition.id == partition.id) & (DetachedPartition.name == partition.name)
    DetachedPartition.delete().where(same).execute()


_FORGET: Final = f"""
DELETE FROM {{records}} WHERE worker = %s AND partition_of = %s AND NOT EXISTS (
    SELECT FROM pg_class LEFT JOIN pg_inherits ON inhrelid = pg_class.oid
    WHERE pg_class.oid = to_regclass(name) AND pg_class.oid::bigint = id AND (NOT relispartition OR {_PENDING})
)
"""  # noqa: S608 - of a constant
#: A record that stays does no harm as long as its partition is attached.
_FORGET_TIMEOUT: Final = timedelta(seconds=1)


def forget_attached(worker: str, table: PartitionedTable) -> None:
    """Remove the worker's records of partitions that are attached after all, or gone.

    If another run is detaching a partition of the table, a later call does so: that run's record must stay.
    """
    try:
        with time_limit(_FORGET_TIMEOUT):
            be_alone(table)
            database.execute_sql(_FORGET.format(records=_records()), (worker, table.name))
    except OperationalError as error:
        if outcome_of(error) != "busy":
            raise


def _records() -> str:
    meta: Any = DetachedPartition._meta
    return f'"{meta.schema}".{meta.table_name}'


#: SQLSTATE -> what it says about a partition: that another one of the table is being detached, that it was dropped or
#: detached meanwhile, or that a foreign key, a view or a function still refers to it.
_OUTCOMES: Final[dict[str | None, Literal["busy", "gone", "stays"]]] = {
    "55000": "busy",
    "42P01": "gone",
    **dict.fromkeys(("23503", "2BP01", "23001"), "stays"),
}
#: Advisory lock of a table. Its holder may record and detach a partition.
_ALONE: Final = "hashtextextended('housekeeping partitions of ' || %s, 0)"
#: The limit of each wait for a lock so far, and a new one.
_LIMIT: Final = "current_setting('lock_timeout'), set_config('lock_timeout', %s,"
#: A partition that another session has detached and attached again may have other bounds, or another table.
_STATE: Final = f"""
SELECT CASE WHEN {_PENDING} THEN 'pending' WHEN relispartition THEN 'attached' ELSE (
    SELECT 'detached' FROM {{records}} WHERE id = pg_class.oid::bigint AND name = %(name)s
) END
FROM pg_class LEFT JOIN pg_inherits ON inhrelid = pg_class.oid
WHERE pg_class.oid = %(id)s AND pg_class.oid = to_regclass(%(name)s) AND (
    NOT relispartition OR (inhparent = to_regclass(%(table)s) AND pg_get_expr(relpartbound, pg_class.oid) = %(bounds)s)
)
"""  # noqa: S608 - of a constant


def outcome_of(error: BaseException) -> Literal["busy", "gone", "stays"] | None:
    """Return what an error says about a partition; None if it is about something else.

    ``busy``: only other sessions made the attempt fail. ``gone``: another session has taken it over, or a table that
    a predicate reads is missing. ``stays``: another object still refers to it.
    """
    return "busy" if is_timeout(error) or is_conflict(error) else _OUTCOMES.get(sqlstate(error))


def state_of(table: PartitionedTable, partition: Partition) -> State | None:
    """Return the current state of the partition.

    None if it is another's: dropped, renamed, attached with other bounds or to another table, or detached without a
    record.
    """
    identity = {"id": partition.id, "name": partition.name, "table": table.name, "bounds": partition.bounds}
    row: Any = database.execute_sql(_STATE.format(records=_records()), identity).fetchone()
    return None if row is None else row[0]


@contextmanager
def alone(table: PartitionedTable, lock_timeout: timedelta) -> Iterator[None]:
    """Keep other runs from detaching partitions of the table during the block, in several transactions.

    Limits each wait for a lock in the block. Requires a direct connection, because it locks and sets for the session.
    """
    # If the lock is not granted in time, the statement and with it the setting is rolled back.
    lock = f"SELECT {_LIMIT} false), pg_advisory_lock({_ALONE})"
    before: Any = database.execute_sql(lock, (str(limit_ms(lock_timeout)), table.name)).fetchone()
    try:
        yield
    finally:
        database.execute_sql(f"SELECT {_LIMIT} false), pg_advisory_unlock({_ALONE})", (before[0], table.name))


def be_alone(table: PartitionedTable) -> None:
    """Keep other runs from detaching partitions of the table until the end of the transaction."""
    database.execute_sql(f"SELECT pg_advisory_xact_lock({_ALONE})", (table.name,))


@contextmanager
def waiting_at_most(lock_timeout: timedelta) -> Iterator[None]:
    """Limit each wait for a lock in the block, which is part of a transaction."""
    limit = f"SELECT {_LIMIT} true)"
    before: Any = database.execute_sql(limit, (str(limit_ms(lock_timeout)),)).fetchone()
    yield
    # After an error, the transaction or its savepoint is rolled back, and the setting with it.
    database.execute_sql(limit, (before[0],))


def detach_concurrently(table: PartitionedTable, partition: Partition) -> None:
    """Detach the partition without an exclusive lock on the table; PostgreSQL commits in between.

    The statement allows no transaction around it. It waits for the open transactions that use the table.

    Raises:
      peewee.PeeweeException: The partition is attached, or it is pending and FINALIZE completes it.
    """
    change(f"ALTER TABLE {table.name} DETACH PARTITION {partition.name} CONCURRENTLY")


def change(sql: str) -> None:
    """Execute a statement whose names come from the catalog, quoted by PostgreSQL."""
    database.execute_sql(escaped(sql))


#: What keeps a partition, or one below it: it is being detached, so that reads leave out its rows and a drop would not;
#: and what prevents a drop: its owner, a foreign table, a view, and another object that uses it: a function, or a table
#: with a column of its type. `pg_partition_tree` leaves out a partition that is being detached. The bounds of the
#: partition decide most comparisons with its time, without reading it.
_OBSTACLE: Final = f"""
WITH RECURSIVE part (id, above) AS (
    SELECT %(id)s::oid, NULL::oid
    UNION SELECT inhrelid, inhparent FROM part JOIN pg_inherits ON inhparent = part.id
)
SELECT set_config('constraint_exclusion', 'on', true), coalesce(
    min(CASE WHEN relkind = 'f' AND above IS NULL THEN 'it is a foreign table' END),
    min(parts.oid::regclass::text) FILTER (WHERE above IS NOT NULL AND {_PENDING})
        || ', a partition of it, is being detached',
    CASE WHEN %(drops)s THEN coalesce(
        min(CASE WHEN above IS NULL AND NOT pg_has_role(relowner, 'USAGE')
            THEN 'only ' || pg_get_userbyid(relowner) || ', its owner, can drop it' END),
        'it contains the foreign table ' || min(parts.oid::regclass::text) FILTER (WHERE relkind = 'f'),
        'the view ' || min((
            SELECT min(ev_class::regclass::text) FROM pg_depend JOIN pg_rewrite ON pg_rewrite.oid = objid
            WHERE classid = 'pg_rewrite'::regclass AND refclassid = 'pg_class'::regclass AND refobjid = parts.oid
                AND ev_class <> refobjid
        )) || ' reads it',
        min((
            SELECT min(pg_describe_object(classid, objid, objsubid)) FROM pg_depend
            WHERE deptype = 'n' AND classid IN ('pg_proc'::regclass, 'pg_class'::regclass) AND (
                (refclassid = 'pg_class'::regclass AND refobjid = parts.oid)
                OR (refclassid = 'pg_type'::regclass AND refobjid = reltype)
            )
        )) || ' depends on it'
    ) END
)
FROM part JOIN pg_class AS parts ON parts.oid = part.id
LEFT JOIN pg_inherits ON inhrelid = part.id AND inhparent = above
"""  # noqa: S608 - of a constant


def reason_of_keys(partition: Partition, *, drops: bool) -> str | None:
    """Return the foreign key that keeps the partition; None if none does.

    Parameters:
      drops: Whether the partition is dropped. Detaching it is possible although a foreign key names it.
    """
    for key in foreign_keys_to(partition.name):
        if key.is_own and drops:
            return f"the foreign key {key.name} of {key.table} refers to it"
        columns = zip(map(quoted, key.columns), map(quoted, key.referenced_columns), strict=True)
        joined = " AND ".join(f"one.{referencing} = other.{referenced}" for referencing, referenced in columns)
        sql = f"SELECT 1 FROM {key.table} AS one JOIN {partition.name} AS other ON {joined} LIMIT 1"  # noqa: S608
        if _is_found(escaped(sql)):
            return f"rows of {key.table} refer to it (foreign key {key.name})"
    return None


def reason_of_rows(
    model: type[Model], partition: Partition, conditions: Mapping[str, Any], *, drops: bool = True
) -> str | None:
    """Return why the partition, or a row of it, has to stay; None if nothing keeps it. Requires a transaction.

    Parameters:
      conditions: Reason -> condition of the rows that keep it.
      drops: Whether the partition is dropped. Detaching it is possible although a view or a function uses it.
    """
    row: Any = database.execute_sql(_OBSTACLE, {"id": partition.id, "drops": drops}).fetchone()
    if row[1] is not None:
        return str(row[1])
    if conditions and (role := role_without_rows(partition.id)) is not None:
        return f"policies hide its rows from {role}"
    for why, condition in conditions.items():
        met, parameters = condition_sql(condition, model, "one")
        if _is_found(f"SELECT 1 FROM {escaped(partition.name)} AS one WHERE {met} LIMIT 1", parameters):  # noqa: S608
            return why
    return None


def fails(condition: Any, column: str) -> Any:
    """Return the condition of the rows that do not match `condition`, including those where it is NULL.

    A plain NOT can use an index, and PostgreSQL can disprove it by the bounds of a partition. It is enough if the
    condition cannot be NULL.

    Parameters:
      column: The partition key, which is NULL only in the DEFAULT partition.
    """
    recorder = Recorder()
    recorder.sql(condition)
    may_be_null = recorder.models or any(each.column_name != column and is_nullable(each) for each in recorder.fields)
    return is_not_true(condition) if may_be_null or not isinstance(condition, Expression) else ~condition


def _is_found(sql: str, parameters: Any = None) -> bool:
    return database.execute_sql(sql, parameters).fetchone() is not None
