"""Contestants on tables: the library's worker as in production, and hand-written programs for the same work."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

import psycopg2

from benchmarks.comparison import BY_CTID, FLOOR, PREPARED, Contestant, Place
from housekeeping import RowLog, Sweep, run_sweep
from housekeeping.app import install
from housekeeping.brokers import message_broker
from housekeeping.core import logs
from housekeeping.core.redis import shared_redis
from housekeeping.core.settings import Settings
from housekeeping.database.connection import database
from tests.declarations import changed

_KEYS: Final = "ARRAY(SELECT {key} FROM picked)"
_BATCH: Final = """
WITH picked AS MATERIALIZED (
    SELECT {columns}{place} FROM {table} WHERE {stale} ORDER BY {columns} LIMIT {batch} FOR UPDATE SKIP LOCKED
), {changes}
SELECT {columns}, count(*) OVER () FROM picked ORDER BY {last} LIMIT 1
"""
#: Name prefixes of workers with a lease.
_LEASED: Final = ("ci.", "batched_git_ref_updates.")


def ours(
    worker: str,
    *,
    lines: bool = False,
    row_log: RowLog | None = None,
    argument: Any = None,
    sweeps: Sequence[Sweep] = (),
    **setting: Any,
) -> Contestant:
    """Return a contestant that does a complete run with production settings.

    Parameters:
      lines: Whether the log line for each record is written; else lines begin at warnings.
      row_log: The line for each record of a worker that has none.
      sweeps: The declaration of a worker that is not built in.
      setting: What ``HOUSEKEEPING_WORKERS`` says of it.
    """

    def ready(place: Place) -> Callable[[], object]:
        sweep = composed(place, worker, lines=lines, sweeps=sweeps, **setting)
        if row_log is not None:
            sweep = changed(sweep, log=row_log)
        return lambda: run(sweep, argument)

    return ready


def composed(place: Place, worker: str, *, lines: bool = False, sweeps: Sequence[Sweep] = (), **setting: Any) -> Sweep:
    """Return the configured worker with open connections, as in a process that is already running."""
    # A run must not end early on a slow machine.
    own: dict[str, Any] = {"max_runtime_s": 1500, **setting}
    if worker.startswith(_LEASED):
        own |= {"lease_ttl_s": 3000}
    settings = Settings.load(
        database_url=place.database_url,
        redis_url=place.redis_url,
        log_level="INFO" if lines else "WARNING",
        workers={worker: own},
        repositories_root=place.folder,
        object_stores={"uploads": f"file://{place.store}"},
    )
    logs.configure(settings.log_level, "json")
    broker = message_broker(settings)
    actors = install(broker, settings, sweeps=sweeps)
    broker.client.ping()  # type: ignore[attr-defined]
    shared_redis.get().ping()
    database.connect()
    database.execute_sql("SELECT 1")
    sweep: Sweep = actors[worker].options["sweep"]
    return sweep


def run(sweep: Sweep, argument: Any = None, **options: Any) -> None:
    """Run the worker once, with these options of `run_sweep`.

    Raises:
      RuntimeError: The run is not done.
    """
    result = run_sweep(sweep, argument, **options)
    if result.outcome != "done":
        raise RuntimeError(f"{sweep.name} ended as {result.outcome}: {result.reason} {result.error}")


@dataclass(frozen=True, kw_only=True)
class Floor:
    """Plain hand-written program: one statement a batch in autocommit, keyset pagination, locked rows skipped.

    Attributes:
      stale: The predicate; ``%(now)s`` is the time when the run began.
      order: Columns of the position, the last one the key.
      changes: Statements on the rows for which ``{chosen}`` holds; the key's values are ``{keys}``.
      after: The predicate of rows after a position ``%(p0)s``, ``%(p1)s``, ...; by default a row comparison.
    """

    table: str
    stale: str
    order: tuple[str, ...]
    changes: tuple[str, ...]
    batch: int
    after: str | None = None
    naive: bool = False

    def contestants(self) -> dict[str, Contestant]:
        """Return the floor, and beside it the same with prepared statements, by primary key and by ctid."""
        return {
            FLOOR: self._contestant(prepared=False, by_ctid=False),
            PREPARED: self._contestant(prepared=True, by_ctid=False),
            # Only for a plain table, and a row that another session has just changed is left out.
            BY_CTID: self._contestant(prepared=True, by_ctid=True),
        }

    def _statement(self, after: str, by_ctid: bool) -> str:
        columns, keys = ", ".join(self.order), _KEYS.format(key=self.order[-1])
        chosen = "ctid = ANY(ARRAY(SELECT place FROM picked))" if by_ctid else f"{self.order[-1]} = ANY({keys})"
        changes = [each.format(chosen=chosen, keys=keys) for each in self.changes]
        return _BATCH.format(
            columns=columns,
            place=", ctid AS place" if by_ctid else "",
            table=self.table,
            stale=f"{self.stale} {after}",
            batch=self.batch,
            changes=", ".join(f"change{number} AS ({each})" for number, each in enumerate(changes)),
            last=", ".join(f"{number} DESC" for number in range(1, len(self.order) + 1)),
        )

    def _contestant(self, *, prepared: bool, by_ctid: bool) -> Contestant:
        places = ", ".join(f"%(p{number})s" for number in range(len(self.order)))
        after = self.after or f"({', '.join(self.order)}) > ({places})"
        statements = [self._statement("", by_ctid), self._statement(f"AND {after}", by_ctid)]

        def ready(place: Place) -> Callable[[], object]:
            connection = psycopg2.connect(place.database_url)
            connection.autocommit = True
            cursor = connection.cursor()
            cursor.execute("SELECT 1")

            def work() -> None:
                first, following = (
                    [_prepare(cursor, f"batch{number}", text) for number, text in enumerate(statements)]
                    if prepared
                    else statements
                )
                now = datetime.now(UTC)
                values: dict[str, Any] = {"now": now.replace(tzinfo=None) if self.naive else now}
                cursor.execute(first, values)
                row = cursor.fetchone()
                while row is not None and row[-1] == self.batch:
                    cursor.execute(following, values | {f"p{number}": value for number, value in enumerate(row[:-1])})
                    row = cursor.fetchone()

            return work

        return ready


def _prepare(cursor: Any, name: str, statement: str) -> str:
    """Prepare a statement with named parameters, and return its EXECUTE."""
    names = list(dict.fromkeys(re.findall(r"%\((\w+)\)s", statement)))
    numbered = re.sub(r"%\((\w+)\)s", lambda found: f"${names.index(found[1]) + 1}", statement)
    cursor.execute(f"PREPARE {name} AS {numbered}")
    return f"EXECUTE {name} ({', '.join(f'%({each})s' for each in names)})"
