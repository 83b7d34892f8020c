"""What the library costs PostgreSQL now: rows, WAL, locks, replication lag and dead rows, each with its limit.

It is read when someone looks, in bounded time, and needs no rights beyond those of the workers. What the role may not
read is unknown.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final

from peewee import PeeweeException

from housekeeping.core.errors import DatabaseUnavailable
from housekeeping.core.logs import counted, error_line, in_one_line
from housekeeping.database.catalog import quoted_name
from housekeeping.database.connection import LOCK_TIME, STATEMENT_TIME, database, time_limit, translate_postgres_errors
from housekeeping.database.queries import database_now
from housekeeping.engine.registry import by_database
from housekeeping.engine.speed import WalRate, read_health
from housekeeping.insight.trends import progress_of_run
from housekeeping.insight.wording import outcome_in_words
from housekeeping.ledger.history import RUNNING, RunFilter, read_page
from housekeeping.sweeps.declaration import Sweep
from housekeeping.sweeps.partitions import PartitionStage
from housekeeping.sweeps.table_stage import TableStage

_DEAD_ROWS: Final = 100_000  # fewer do not matter, whatever their share
_DEAD_SHARE: Final = 0.3  # PostgreSQL's autovacuum starts at 0.2 by default
_APART_S: Final = 1.0  # seconds between the two positions of the WAL
_OPEN: Final = 500  # open runs that are read
_WAITING: Final = 50  # waiting sessions whose blockers are looked up
_WIDTH: Final = 60  # characters of an application's name

#: The dead rows of a partitioned table are those of its partitions.
_TABLES: Final = """
WITH RECURSIVE tables (name, id) AS (
    SELECT name, to_regclass(name)::oid FROM unnest(%s::text[]) AS name
    UNION SELECT name, inhrelid FROM tables JOIN pg_inherits ON inhparent = id
)
SELECT name, coalesce(sum(n_live_tup), 0)::bigint, coalesce(sum(n_dead_tup), 0)::bigint,
    max(greatest(last_autovacuum, last_vacuum)),
    bool_or(EXISTS (SELECT FROM pg_stat_progress_vacuum AS p WHERE p.relid = id)),
    bool_or(EXISTS (SELECT FROM pg_options_to_table(reloptions)
        WHERE option_name = 'autovacuum_enabled' AND NOT option_value::bool))
FROM tables JOIN pg_class AS c ON c.oid = id LEFT JOIN pg_stat_all_tables AS s ON s.relid = id GROUP BY name ORDER BY 1
"""
#: pg_locks is readable by every role. Of other roles' sessions, the application is unknown.
_LOCKS: Final = """
WITH ours AS (
    SELECT coalesce(array_agg(pid), '{}') AS pids FROM pg_stat_activity
    WHERE application_name = current_setting('application_name') AND pid <> pg_backend_pid()
), waiting AS MATERIALIZED (
    SELECT pid, min(relation::regclass::text) AS relation FROM pg_locks WHERE NOT granted
    AND coalesce(database, 0) IN (0, (SELECT oid FROM pg_database WHERE datname = current_database()))
    GROUP BY pid LIMIT %s
), blocked AS MATERIALIZED (
    SELECT pid, relation, pg_blocking_pids(pid) AS blockers FROM waiting
)
SELECT pid, pid = ANY (pids), relation, blockers, application_name,
    extract(epoch FROM clock_timestamp() - query_start)::double precision
FROM ours CROSS JOIN blocked LEFT JOIN pg_stat_activity USING (pid)
WHERE pid = ANY (pids) OR blockers && pids ORDER BY 6 DESC NULLS LAST
"""


@dataclass(frozen=True, slots=True)
class Measure:
    """One value with its limit.

    Attributes:
      name: The throttle's name of it, or the worker's name for rows per second.
      value: None if it is unknown.
      limit: The lowest of the workers' limits; None without one.
      trouble: Why the value is unknown.
    """

    name: str
    value: float | None
    limit: float | None = None
    trouble: str | None = None

    @property
    def over(self) -> bool:
        """Whether the value is over its limit."""
        return self.value is not None and self.limit is not None and self.value > self.limit

    def as_json(self) -> dict[str, Any]:
        """Return the value as an element of ``measures`` in ``housekeeping doctor --database --json``."""
        return {"name": self.name, "value": self.value, "limit": self.limit, "over": self.over, "unknown": self.trouble}


@dataclass(frozen=True, slots=True)
class LockWait:
    """A session that waits for a lock: one of the library's, or one that waits for the library.

    Attributes:
      ours: Whether it is the library's.
      table: The one that it waits for; None for a row's lock.
      blockers: Process ids of the sessions that it waits for.
      application: Its name; None if the role may not read it.
      waited_s: Seconds since its statement began; None if unknown.
    """

    pid: int
    ours: bool
    table: str | None
    blockers: Sequence[int]
    application: str | None
    waited_s: float | None


@dataclass(frozen=True, slots=True)
class TableState:
    """Dead rows of a table.

    Attributes:
      vacuumed_at: The last end of a VACUUM; None if there was none since the statistics were reset.
      vacuum_runs: Whether one is running.
      vacuum_off: Whether autovacuum is off for it.
    """

    table: str
    live_rows: int
    dead_rows: int
    vacuumed_at: datetime | None
    vacuum_runs: bool
    vacuum_off: bool

    @property
    def limit(self) -> int:
        """Dead rows above which VACUUM is behind."""
        return max(_DEAD_ROWS, int(_DEAD_SHARE * (self.live_rows + self.dead_rows)))

    @property
    def over(self) -> bool:
        """Whether VACUUM is behind, or off."""
        return self.problem is not None

    @property
    def problem(self) -> tuple[str, str] | None:
        """What is wrong, and what to do; None if nothing is."""
        if self.vacuum_off:
            return "is off: deleted rows are never removed", f"ALTER TABLE {self.table} RESET (autovacuum_enabled)"
        if self.dead_rows > self.limit and not self.vacuum_runs:
            rows = f"{counted(self.dead_rows, 'dead row')} and {counted(self.live_rows, 'live one')}"
            return f"{rows}, and no running VACUUM", f"VACUUM {self.table}; is a long transaction open?"
        return None

    def as_json(self) -> dict[str, Any]:
        """Return the table as an element of ``tables`` in ``housekeeping doctor --database --json``."""
        shown = ("table", "live_rows", "dead_rows", "limit", "over", "vacuumed_at", "vacuum_runs", "vacuum_off")
        return {**{name: getattr(self, name) for name in shown}, "problem": self.problem and self.problem[0]}


@dataclass(slots=True)
class DatabaseLoad:
    """What the library costs one database.

    Attributes:
      at: The database's time; None if it does not answer.
      started_at: When its server was started. That explains runs whose connections it ended.
      measures: WAL, locks and replication.
      workers: Rows per second of the open runs, by worker.
      incomplete: What could not be read, and why.
    """

    name: str
    at: datetime | None = None
    started_at: datetime | None = None
    measures: Sequence[Measure] = ()
    workers: Sequence[Measure] = ()
    waits: Sequence[LockWait] = ()
    tables: Sequence[TableState] = ()
    incomplete: list[str] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """Return one element of ``databases`` in ``housekeeping doctor --database --json``."""
        rates = [
            {"worker": each.name, "rows_per_s": each.value, "limit": each.limit, "over": each.over}
            for each in self.workers
        ]
        return {
            "database": self.name,
            "at": self.at,
            "measures": self.measures,
            "workers": rates,
            "waits": self.waits,
            "tables": self.tables,
            "incomplete": self.incomplete,
        }

    @property
    def over(self) -> bool:
        """Whether a value is over its limit."""
        measures = any(each.over for each in (*self.measures, *self.workers))
        return measures or any(each.over for each in self.tables)


def table_states(tables: Sequence[str]) -> list[TableState]:
    """Return the state of each of these tables that exists, quoted for SQL."""
    rows: Any = database.execute_sql(_TABLES, (list(tables),)).fetchall()
    return [TableState(*row) for row in rows]


def read_loads(sweeps: Iterable[Sweep], wait: Callable[[float], object] = time.sleep) -> list[DatabaseLoad]:
    """Return what the workers cost each of their databases. It takes a second for each, for the rate of the WAL."""
    return [_read(name, workers, wait) for name, workers in by_database(sweeps).items()]


def _read(name: str, sweeps: Sequence[Sweep], wait: Callable[[float], object]) -> DatabaseLoad:
    load, wal = DatabaseLoad(name), WalRate()
    tables = sorted({quoted_name(each.model) for sweep in sweeps if sweep.enabled for each in _stages(sweep)})

    def limit(gate: str) -> float | None:
        given = (getattr(sweep.limits.throttle, gate) for sweep in sweeps)
        return min((each for each in given if each is not None), default=None)

    try:
        with database.using(name), translate_postgres_errors():
            with time_limit(STATEMENT_TIME, LOCK_TIME):
                load.at = database_now()
                load.started_at = database.execute_sql("SELECT pg_postmaster_start_time()").fetchone()[0]
                wal.look(time.monotonic())
            load.workers = _rows_per_s(name, sweeps)
            load.waits = _part(load, "locks", _lock_waits)
            load.tables = _part(load, "tables", lambda: table_states(tables))
            with time_limit(STATEMENT_TIME, LOCK_TIME):
                health = read_health(tables)
            wait(_APART_S)
            with time_limit(STATEMENT_TIME, LOCK_TIME):
                state = wal.look(time.monotonic())
    except DatabaseUnavailable as error:
        load.incomplete.append(error_line(error))
        return load
    no_right = "this role may not read it; GRANT pg_monitor to it"
    load.measures = [
        Measure("wal_mb_per_s", state.mb_per_s, limit("wal_mb_per_s"), state.trouble or no_right),
        Measure("slot_lag_mb", state.slot_lag_mb, limit("slot_lag_mb"), state.trouble or no_right),
        Measure("replication_lag_s", health.replication_lag_s, limit("replication_lag_s"), health.trouble or no_right),
        Measure("waiting_locks", health.waiting_locks, limit("waiting_locks"), health.trouble or no_right),
    ]
    return load


def _stages(sweep: Sweep) -> list[Any]:
    return [each for each in sweep.declared_stages() if isinstance(each, TableStage | PartitionStage)]


def _part(load: DatabaseLoad, what: str, read: Callable[[], list[Any]]) -> list[Any]:
    """Return what was read; nothing, and a note in the load, if the statement is rejected or takes too long."""
    try:
        with time_limit(STATEMENT_TIME, LOCK_TIME):
            return read()
    except PeeweeException as error:
        load.incomplete.append(f"{what}: {error_line(error)}")
        return []


def _lock_waits() -> list[LockWait]:
    rows: Any = database.execute_sql(_LOCKS, (_WAITING,)).fetchall()
    return [
        LockWait(pid, ours, relation, blockers, application and in_one_line(application, _WIDTH), seconds)
        for pid, ours, relation, blockers, application, seconds in rows
    ]


def _rows_per_s(name: str, sweeps: Sequence[Sweep]) -> list[Measure]:
    """Return the rows per second of each worker with an open run. A silent run may be dead, so its rate is unknown."""
    found, silent, known = dict[str, float](), dict[str, str](), {each.name: each for each in sweeps}
    for run in read_page((name,), lambda now: RunFilter(outcome=RUNNING), limit=_OPEN).runs:
        if run.worker in known and run.is_silent:
            silent[run.worker] = f"run {run.label}: {outcome_in_words(run)}"
        elif run.worker in known:
            rate = progress_of_run(known[run.worker], run).rows_per_s
            found[run.worker] = found.get(run.worker, 0.0) + (rate or 0.0)
    return [
        Measure(worker, found.get(worker), known[worker].limits.rows_per_s, silent.get(worker))
        for worker in sorted(found.keys() | silent.keys())
    ]
