"""Assertions about a sweep: a second run changes nothing, and a run can be killed at any point.

`Tables` copies, compares and restores the tables that a sweep may change.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from types import TracebackType
from typing import Any, Final, Self
from uuid import uuid4

import psycopg2
from peewee import Model, fn
from psycopg2.errors import LockNotAvailable

from housekeeping.core.errors import Refused
from housekeeping.core.logs import counted
from housekeeping.core.telemetry import MessageContext, current_message
from housekeeping.database.catalog import quoted_name
from housekeeping.database.connection import database
from housekeeping.engine import RunResult
from housekeeping.engine.run import run_sweep
from housekeeping.leases.renewal import shared_lease_store
from housekeeping.ledger import runs
from housekeeping.ledger.schema import NOW, Run
from housekeeping.sweeps.actions import ARCHIVED_BY_RUN
from housekeeping.sweeps.declaration import Sweep
from housekeeping.sweeps.partitions import PartitionStage
from housekeeping.sweeps.rows import Rows
from housekeeping.sweeps.table_stage import TableStage
from housekeeping.sweeps.validate_tables import archives_of
from housekeeping.testing.points import Ended, run_in_process
from housekeeping.testing.stubs import ManualClock

#: Rows per table. A larger table may not be a test's, and must not be emptied and refilled.
MOST_ROWS: Final = 10_000
_SHOWN: Final = 3  # rows per kind and table

#: The tables in the search path and those of the sweep, without the library's own and those of extensions. Partitions
#: are listed instead of their parent. As far as possible, referenced tables come first.
_TABLES: Final = """
WITH RECURSIVE tables (id) AS (
    SELECT pg_class.oid FROM pg_class JOIN pg_namespace ON pg_namespace.oid = relnamespace
    WHERE relkind = 'r' AND relpersistence <> 't' AND nspname <> %(own)s
    AND (
        nspname = ANY(current_schemas(false))
        OR pg_class.oid IN (
            SELECT to_regclass(name) FROM unnest(%(named)s::text[]) AS name
            UNION SELECT relid FROM unnest(%(named)s::text[]) AS name, pg_partition_tree(to_regclass(name))
        )
    )
    AND NOT EXISTS (SELECT FROM pg_depend WHERE objid = pg_class.oid AND deptype = 'e')
), levels (id, level) AS (
    SELECT id, 0 FROM tables
    UNION
    SELECT conrelid, level + 1 FROM levels JOIN pg_constraint ON confrelid = levels.id AND contype = 'f'
    WHERE conrelid <> confrelid AND level < 20
)
SELECT
    id::regclass::text,
    ARRAY(
        SELECT quote_ident(attname) FROM pg_attribute
        WHERE attrelid = id AND attnum > 0 AND NOT attisdropped AND attgenerated = '' ORDER BY attnum
    ),
    ARRAY(SELECT quote_ident(tgname) FROM pg_trigger WHERE tgrelid = id AND NOT tgisinternal AND tgenabled = 'O')
FROM tables JOIN levels USING (id) GROUP BY id ORDER BY max(level), 1
"""
#: A sweep writes the database's time of each change, which differs between two runs.
_COMPARABLE: Final = r"""
CREATE FUNCTION pg_temp.housekeeping_comparable(contents jsonb, since timestamptz) RETURNS jsonb LANGUAGE sql AS $$
    SELECT jsonb_object_agg(key, CASE
        WHEN value #>> '{}' !~ '^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?([+-]\d\d(:\d\d)?)?$' THEN value
        WHEN (value #>> '{}')::timestamptz BETWEEN since AND clock_timestamp() THEN '"a time during this test"'
        ELSE value
    END) FROM jsonb_each(contents)
$$
"""
_DIFFERENCES: Final = """
WITH kept (contents) AS (
    SELECT pg_temp.housekeeping_comparable(to_jsonb(one) - %(ignoring)s::text[], %(since)s) FROM {copy} AS one
), found (contents) AS (
    SELECT pg_temp.housekeeping_comparable(to_jsonb(one) - %(ignoring)s::text[], %(since)s) FROM {table} AS one
)
SELECT '-', gone.contents::text FROM (SELECT * FROM kept EXCEPT ALL SELECT * FROM found) AS gone
UNION ALL SELECT '+', come.contents::text FROM (SELECT * FROM found EXCEPT ALL SELECT * FROM kept) AS come
"""

_PARTS: Final = """
SELECT to_regclass(%(name)s)::text UNION SELECT relid::text FROM pg_partition_tree(to_regclass(%(name)s))
"""


@dataclass(frozen=True, slots=True)
class _Table:
    name: str
    columns: Sequence[str]
    triggers: Sequence[str]


@dataclass(frozen=True, slots=True)
class Difference:
    """Differences between a table and its copy.

    Attributes:
      gone: Rows that are only in the copy, as JSON.
      come: Rows that are only in the table.
    """

    table: str
    gone: Sequence[str]
    come: Sequence[str]

    def __str__(self) -> str:
        lines = [f"  table {self.table}:"]
        for sign, rows in (("-", self.gone), ("+", self.come)):
            lines += [f"    {sign} {row}" for row in rows[:_SHOWN]]
            if len(rows) > _SHOWN:
                lines.append(f"    {sign} ... and {len(rows) - _SHOWN} more")
        return "\n".join(lines)


class Tables:
    """All tables in the database's search path and those of the sweep, on a connection of its own.

    Raises:
      Refused: When no database is set, there is no table, or the connection leads through a pooler.
    """

    def __init__(self, sweep: Sweep) -> None:
        if database.obj is None:
            raise Refused("no database is set; use the fixture housekeeping_database, or call housekeeping.install")
        if database.in_transaction():
            raise Refused("a transaction is open on the library's connection; end it, because runs do not see its rows")
        if database.prepared() is None:
            raise Refused(
                "the connection leads through a pooler, which keeps no session; use the URL of PostgreSQL itself"
            )
        stages = sweep.stages_for_run()
        if any(isinstance(each, PartitionStage) for each in stages):
            raise Refused(f"{sweep.name}: tables that it drops cannot be restored; test it by run_sweep and plan")
        archives = [quoted_name(each) for each in archives_of(stages)]
        named = [*(quoted_name(each.model) for each in stages if isinstance(each, TableStage)), *archives]
        self.connection = psycopg2.connect(dbname=database.obj.database, **database.obj.connect_params)
        self.connection.autocommit = True
        self.run(_COMPARABLE)
        self._since = self.run("SELECT clock_timestamp()")[0][0]
        ledger: Any = Run._meta
        found = self.run(_TABLES, {"own": ledger.schema, "named": named})
        self._archives = {part for name in archives for part in self._parts_of(name)}
        self._tables = [_Table(*row) for row in found]
        if not self._tables:
            self.connection.close()
            raise Refused(f"{sweep.name}: there is no table in the search path of the database")

    def run(self, sql: str, parameters: Any = None) -> list[Any]:
        """Execute a statement and return its rows."""
        with self.connection.cursor() as cursor:
            cursor.execute(sql, parameters)
            return list(cursor.fetchall()) if cursor.description else []

    def save(self, copy: str) -> None:
        """Copy the contents of the tables under this name.

        Raises:
          Refused: When a table has too many rows for a test.
        """
        for number, table in enumerate(self._tables):
            (rows,) = self.run(f"SELECT count(*) FROM (SELECT 1 FROM {table.name} LIMIT {MOST_ROWS + 1}) AS counted")[0]  # noqa: S608
            if rows > MOST_ROWS:
                raise Refused(
                    f"{table.name} has more than {MOST_ROWS:,} rows: this is for a few rows in a test's own schema"
                )
            self.run(f"CREATE TEMPORARY TABLE {_copy(copy, number)} AS TABLE {table.name}")

    def restore(self, copy: str) -> None:
        """Restore the contents from the copy.

        Raises:
          Refused: When another session has locked a table.
        """
        try:
            self._restore(copy)
        except LockNotAvailable:
            raise Refused("the tables are locked: a session of this test has an open transaction") from None

    def _restore(self, copy: str) -> None:
        statements = [f"TRUNCATE {', '.join(table.name for table in self._tables)}", "SET CONSTRAINTS ALL DEFERRED"]
        for number, table in enumerate(self._tables):
            columns = ", ".join(table.columns)
            statements += [f"ALTER TABLE {table.name} DISABLE TRIGGER {trigger}" for trigger in table.triggers]
            statements.append(
                f"INSERT INTO {table.name} ({columns}) OVERRIDING SYSTEM VALUE "  # noqa: S608
                f"SELECT {columns} FROM {_copy(copy, number)}"
            )
        # Triggers can be enabled only when no constraint check is pending.
        statements.append("SET CONSTRAINTS ALL IMMEDIATE")
        for table in self._tables:
            statements += [f"ALTER TABLE {table.name} ENABLE TRIGGER {trigger}" for trigger in table.triggers]
        self.run(";\n".join(statements))  # one transaction, because they are sent together

    def differences(self, copy: str, ignoring: Sequence[str] = ()) -> list[Difference]:
        """Return the differences from the copy, except in ignored columns, times of changes and an archive's runs."""
        found: list[Difference] = []
        for number, table in enumerate(self._tables):
            sql = _DIFFERENCES.format(copy=_copy(copy, number), table=table.name)
            # The id of a run differs between two runs, and a killed one is followed by another.
            unequal = [*ignoring, *([ARCHIVED_BY_RUN] if table.name in self._archives else [])]
            parameters = {"ignoring": unequal, "since": self._since}
            rows: list[tuple[str, str]] = sorted(self.run(sql, parameters), key=lambda row: row[1])
            if rows:
                sides = ([row for sign, row in rows if sign == side] for side in "-+")
                found.append(Difference(table.name, *sides))
        return found

    def changed_rows(self, copy: str, model: type[Model], ignoring: Sequence[str] = ()) -> int:
        """Return how many rows of the model's table were changed or removed since the copy, partitions included."""
        names = self._parts_of(quoted_name(model))
        return sum(len(each.gone) for each in self.differences(copy, ignoring) if each.table in names)

    def _parts_of(self, table: str) -> set[str]:
        """Return the names of the table and its partitions."""
        return {name for (name,) in self.run(_PARTS, {"name": table})}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.connection.close()


def _copy(name: str, number: int) -> str:
    return f"pg_temp.housekeeping_{name}_{number}"


#: Returns a sweep's effects outside of PostgreSQL, as a value that can be compared and shown.
Outside = Callable[[], object]


#: pytest shows the line of the test instead of this module's.
__tracebackhide__: Final = True
_MOST_RUNS: Final = 1_000  # more partial runs than that mean that the sweep makes no progress


def assert_idempotent(
    sweep: Sweep,
    argument: Any = None,
    *,
    now: datetime | None = None,
    ignoring: Sequence[str] = (),
    outside: Outside | None = None,
) -> None:
    """Run the sweep to its end twice and assert that the second time changes nothing.

    Compares the contents of all tables in the search path and the counts in the ledger. The tables keep the changes of
    the runs.

    ::

        def test_it_is_idempotent(expired_sessions):
            assert_idempotent(sweep)

    Parameters:
      argument: The sweep's argument, if it has one.
      now: The time of both runs; the current time unless given.
      ignoring: Columns that may differ, such as one that a trigger sets.
      outside: Returns the sweep's effects outside of PostgreSQL, such as names of files, which are compared as well.

    Raises:
      AssertionError: With the first rows that differ. Also when the first run has nothing to do, which proves nothing.
    """
    now = now or datetime.now(UTC)
    with database.using(sweep.database), Tables(sweep) as tables:
        tables.save("at_first")
        before, seen_before = _last_run(), outside() if outside else None
        _run_to_the_end(sweep, argument, now)
        first, seen = _progress_since(sweep, before), outside() if outside else None
        if not tables.differences("at_first") and seen == seen_before:
            raise AssertionError(_nothing_changed(sweep, before))
        tables.save("after_the_first")
        between = _last_run()
        _run_to_the_end(sweep, argument, now)
        problems = [str(difference) for difference in tables.differences("after_the_first", ignoring)]
        again = _progress_since(sweep, between)
        if any(again.values()):
            problems.append(f"  counts of the second run are {again}, those of the first are {first}")
        if outside and (after := outside()) != seen:
            problems += [f"  outside, after the first:  {seen!r}", f"  outside, after the second: {after!r}"]
    if problems:
        legend = "  (- after the first run, + after the second)"
        lines = [f"{sweep.name} is not idempotent: a second run over the same rows changed", *problems, legend]
        raise AssertionError("\n".join(lines))


def assert_survives_kill(
    sweep: Sweep,
    argument: Any = None,
    *,
    now: datetime | None = None,
    ignoring: Sequence[str] = (),
    outside: Outside | None = None,
    restore: Callable[[], Any] | None = None,
) -> list[str]:
    """Kill a run by SIGKILL at each point, deliver its message again, and compare with an uninterrupted run.

    Points are every statement, Redis command, file written by Python, program started and request by `http.client`. The
    run is killed before each of them, each time in a new process with the same initial rows. This takes about 0.1 s per
    point; a few batches of a few rows are enough. The killed run's silence and the ttl of its lease are skipped.

    ::

        def test_it_survives_kill(expired_sessions):
            assert_survives_kill(sweep)

    Parameters:
      argument, now, ignoring: As for `assert_idempotent`.
      outside: Returns the sweep's effects outside of PostgreSQL, which must end like those of an uninterrupted run.
      restore: Restores the initial state outside of PostgreSQL; called before each run.

    Returns:
      The points.

    Raises:
      AssertionError: With the point and the first rows that differ. Also when there is nothing to do.
      Refused: When a table has more than 10,000 rows, or a transaction of the test is open.

    Note: The killed process loses its memory, including lists of the test. Calls in compiled libraries such as obstore
      are not points; check the returned points.
    """
    with database.using(sweep.database), Tables(sweep) as tables:
        tables.save("at_first")
        try:
            return _Trials(sweep, argument, now or datetime.now(UTC), ignoring, outside, restore, tables).run()
        finally:
            tables.restore("at_first")


@dataclass
class _Trials:
    sweep: Sweep
    argument: Any
    now: datetime
    ignoring: Sequence[str]
    outside: Outside | None
    restore: Callable[[], Any] | None
    tables: Tables

    def run(self) -> list[str]:
        self.since, self.alive = _last_run(), random.getrandbits(62)
        self._reset()
        before = self._read_outside()
        points = self._run_killed_at(None).points
        self.counts, self.seen = _progress_since(self.sweep, self.since), self._read_outside()
        if not self.tables.differences("at_first") and self.seen == before:
            raise AssertionError(_nothing_changed(self.sweep, self.since))
        self.tables.save("at_last")
        self._run_killed_at(None)
        self._compare("differs between two uninterrupted runs; name the columns to ignore by `ignoring`")
        self._check_counts()
        for number in range(len(points) + 1):
            ended = self._run_killed_at(number)
            self._compare(f"does not survive a kill at point {number + 1} of {len(points)}", _where(ended))
            if not ended.killed:
                break
        return points

    def _check_counts(self) -> None:
        if not isinstance(self.sweep.stages, Rows) or not self.counts:
            return  # only the author of the stages knows which rows they count
        (name, number), *_ = self.counts.items()
        changed = self.tables.changed_rows("at_first", self.sweep.model, self.ignoring)
        # Of a table that refers to itself, further rows are dependents, which have counts of their own.
        if number != changed and not (len(self.counts) > 1 and number < changed):
            raise AssertionError(
                f"{self.sweep.name}: {name} is {number} in the ledger, but {counted(changed, 'row')} changed"
            )

    def _run_killed_at(self, point: int | None) -> Ended:
        """Kill a run at this point, or never, and let its message be delivered again until nothing is left to do."""
        self._reset()
        message_id = str(uuid4())

        def run() -> str:
            result = _run_as(message_id, self.sweep, self.argument, self.now)
            return result.outcome if result.error is None else f"{result.outcome}: {result.reason}"

        ended = run_in_process(run, point, self.alive)
        # A PostgreSQL backend continues for a moment after its client is gone, and keeps its locks.
        self.tables.run("SELECT pg_advisory_lock(%s)", (self.alive,))
        self.tables.run("SELECT pg_advisory_unlock(%s)", (self.alive,))
        if ended.returned not in (None, "done", "partial"):
            raise AssertionError(f"{self.sweep.name}: the run ended as {ended.returned}")
        self._expire_killed_run()
        try:
            _run_to_the_end(self.sweep, self.argument, self.now, message_id)
        except AssertionError as error:
            error.add_note(_where(ended))
            raise
        return ended

    def _compare(self, failure: str, *where: str) -> None:
        """Raise AssertionError if tables, counts or outside effects are not those of the uninterrupted run."""
        problems = [str(difference) for difference in self.tables.differences("at_last", self.ignoring)]
        counts = _progress_since(self.sweep, self.since)
        if counts != self.counts:
            problems.append(f"  counts are {counts} in total, those of an uninterrupted run are {self.counts}")
        if (seen := self._read_outside()) != self.seen:
            problems += [f"  outside: {seen!r}", f"  uninterrupted: {self.seen!r}"]
        if problems:
            legend = "  (- only in an uninterrupted run, + only in this run)"
            raise AssertionError("\n".join([f"{self.sweep.name} {failure}", *where, *problems, legend]))

    def _read_outside(self) -> object:
        return self.outside() if self.outside else None

    def _reset(self) -> None:
        self.tables.restore("at_first")
        Run.delete().where(Run.id > self.since).execute()
        if self.restore:
            self.restore()

    def _expire_killed_run(self) -> None:
        """Make the killed run look lost, and release its lease."""
        Run.update(heartbeat_at=NOW - 2 * runs.SILENCE).where((Run.id > self.since) & Run.outcome.is_null()).execute()
        if (lease := self.sweep.lease_for_run()) is not None:
            store = shared_lease_store()
            key = lease.key_for(self.argument)
            if (owner := store.owner(key)) is not None:
                store.release(key, owner)


def _where(ended: Ended) -> str:
    if not ended.killed:
        return "  not killed"
    done = ended.points[-2] if len(ended.points) > 1 else "(nothing)"
    return f"  killed after:  {done}\n  killed before: {ended.points[-1]}\n  and then run to its end"


def _run_as(message_id: str, sweep: Sweep, argument: Any, now: datetime) -> RunResult:
    """Run the sweep once, as a worker would for this message."""
    token = current_message.set(MessageContext(message_id, worker=sweep.name))
    try:
        return run_sweep(sweep, argument, clock=ManualClock(now))
    finally:
        current_message.reset(token)


def _run_to_the_end(sweep: Sweep, argument: Any, now: datetime, message_id: str | None = None) -> None:
    """Run the sweep until nothing is left to do; the first message may have been processed before.

    Raises:
      AssertionError: When a run fails.
    """
    for _ in range(_MOST_RUNS):
        result = _run_as(message_id or str(uuid4()), sweep, argument, now)
        if result.outcome == "done" or (result.outcome, result.reason) == ("skipped", "already_done"):
            return
        if result.outcome != "partial":
            raise AssertionError(f"{sweep.name}: the run ended as {result.outcome}: {result.reason}") from result.error
        message_id = None
    raise AssertionError(f"{sweep.name}: not done after {_MOST_RUNS:,} runs; the last one ended as {result.reason}")


def _last_run() -> int:
    """Return the id of the newest run in the ledger, or 0."""
    newest: int | None = Run.select(fn.MAX(Run.id)).scalar()
    return newest or 0


def _nothing_changed(sweep: Sweep, since: int) -> str:
    """Return the error message for runs after row `since` of the ledger that changed nothing."""
    failed = _summed(sweep, since, ["failed"])["failed"]
    if failed:
        why = f": {counted(failed, 'row')} failed; the log of a run_sweep(sweep) says why"
    else:
        why = "; put stale rows into its tables first"
    return f"{sweep.name} changed nothing, which proves nothing{why}"


def _progress_since(sweep: Sweep, since: int) -> dict[str, int]:
    """Return the sums of the sweep's progress counts over all runs after row `since` of the ledger."""
    return _summed(sweep, since, sweep.progress_counts)


def _summed(sweep: Sweep, since: int, names: Iterable[str]) -> dict[str, int]:
    rows: Any = Run.select(Run.counts).where((Run.worker == sweep.name) & (Run.id > since)).tuples()
    found = [counts for (counts,) in rows]
    return {name: sum(counts.get(name, 0) for counts in found) for name in names}
