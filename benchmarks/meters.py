"""Costs of a turn from the servers' statistics."""

from __future__ import annotations

import contextlib
import threading
from dataclasses import dataclass
from typing import Any, Final, Self

import psutil
import redis
from psycopg2.extensions import connection as Connection


@dataclass(frozen=True, slots=True)
class Reading:
    """Statistics of the servers at one time, or their difference between two times.

    Attributes:
      commits: Transactions that wrote something.
      wal_bytes: Bytes of write-ahead log.
      statements: What was sent to PostgreSQL, BEGIN and COMMIT included; None if not counted by this server.
      redis_commands: What Redis carried out, within scripts as well.
      redis_trips: How often Redis read something from a connection: round trips, where no message is large.
      server_seconds: Processor time of both servers.
    """

    commits: int
    wal_bytes: int
    statements: int | None
    redis_commands: int
    redis_trips: int
    server_seconds: float

    def since(self, before: Reading) -> Reading:
        """Return the difference to `before`."""
        both = None not in (self.statements, before.statements)
        return Reading(
            self.commits - before.commits,
            self.wal_bytes - before.wal_bytes,
            (self.statements or 0) - (before.statements or 0) if both else None,
            self.redis_commands - before.redis_commands,
            self.redis_trips - before.redis_trips,
            self.server_seconds - before.server_seconds,
        )


_LOOK_EVERY_S: Final = 0.02
_OLDEST: Final = """
SELECT coalesce(max(extract(epoch FROM clock_timestamp() - xact_start)), 0)::float FROM pg_stat_activity
WHERE datname = %s AND backend_type = 'client backend'
"""


class LongestTransaction:
    """Measure the longest transaction in a database during a block, by looks every 20 ms. None before its end.

    Parameters:
      connection: To another database of the same server, for this measurement alone.
    """

    def __init__(self, connection: Connection, database: str) -> None:
        self.seconds: float | None = None
        self._connection = connection
        self._database = database
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._thread.join()

    def _look(self) -> None:
        longest = 0.0
        with self._connection.cursor() as cursor:
            while not self._ended.wait(_LOOK_EVERY_S):
                cursor.execute(_OLDEST, (self._database,))
                row: Any = cursor.fetchone()
                longest = max(longest, row[0])
        self.seconds = longest


class Meters:
    """Reader of the statistics that excludes its own queries.

    Parameters:
      connection: To another database of the same server; nobody but the one measured may be at work there.
      postmaster: The process id of PostgreSQL.
    """

    def __init__(self, connection: Connection, client: redis.Redis, postmaster: int) -> None:
        self._connection = connection
        self._postmaster = postmaster
        self._client: Any = client
        self._client.ping()
        self._own = 0
        with connection.cursor() as cursor:
            cursor.execute("SELECT 1 FROM pg_extension WHERE extname = 'pg_stat_statements'")
            self._counts_statements = cursor.fetchone() is not None

    def read(self, database: str) -> Reading:
        """Return the current statistics, with the statements of this database."""
        info = self._client.info("everything")
        commands = int(info["total_commands_processed"]) - self._own
        trips = int(info["total_reads_processed"]) - self._own
        self._own += 1  # this query
        busy = float(info["used_cpu_sys"]) + float(info["used_cpu_user"]) + self._postgres_seconds()
        with self._connection.cursor() as cursor:
            # The next transaction id can be read without using one.
            cursor.execute(
                "SELECT pg_snapshot_xmax(pg_current_snapshot())::text::bigint, "
                "pg_wal_lsn_diff(pg_current_wal_insert_lsn(), '0/0')::bigint"
            )
            row: Any = cursor.fetchone()
            return Reading(row[0], row[1], self._statements(cursor, database), commands, trips, busy)

    def _postgres_seconds(self) -> float:
        """Return the CPU time of all PostgreSQL processes. The measured one is still connected."""
        seconds = 0.0
        for process in psutil.Process(self._postmaster).children():
            with contextlib.suppress(psutil.NoSuchProcess):
                times = process.cpu_times()
                seconds += times.user + times.system
        return seconds

    def _statements(self, cursor: Any, database: str) -> int | None:
        if not self._counts_statements:
            return None
        cursor.execute(
            "SELECT coalesce(sum(calls), 0)::bigint FROM pg_stat_statements(false) WHERE toplevel "
            "AND dbid = (SELECT oid FROM pg_database WHERE datname = %s)",
            (database,),
        )
        return int(cursor.fetchone()[0])
