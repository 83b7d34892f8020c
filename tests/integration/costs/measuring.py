"""Countable costs of a run, which do not depend on the machine's speed."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, astuple, dataclass, fields
from pathlib import Path
from typing import Any, Final

import redis
from psycopg2.extensions import connection as Connection
from psycopg2.extensions import cursor as Cursor

#: Permitted difference from the recorded cost in either direction: less than any change that matters, more than
#: the difference between PostgreSQL's versions (a hundredth of the bytes).
MARGIN: Final = 0.1
#: Permitted difference of small values, between PostgreSQL's versions.
SLACK: Final = {"wal_bytes": 512}
#: Recorded costs by the case's name; the tests rewrite them when the environment says so.
WRITTEN: Final = Path(__file__).with_name("written.json")
REWRITE: Final = "HOUSEKEEPING_TEST_WRITE_COSTS"


@dataclass(frozen=True, slots=True)
class Costs:
    """Costs of one run.

    Attributes:
      statements: Statements sent to PostgreSQL, including BEGIN and COMMIT; several in one string count as one.
      commits: Transactions that wrote something.
      wal_bytes: Size of the write-ahead log, without full-page images.
      redis_commands: Commands that Redis executed, including those of scripts, without ``CLIENT``. Each new connection
        names its library by it, and not every version of Redis knows and counts that.
    """

    statements: int
    commits: int
    wal_bytes: int
    redis_commands: int

    def unlike(self, written: Costs) -> dict[str, tuple[int, int]]:
        """Return name -> (measured, recorded) for costs that differ by more than the margin."""
        return {
            field.name: (is_now, was)
            for field, is_now, was in zip(fields(self), astuple(self), astuple(written), strict=True)
            if abs(is_now - was) > max(MARGIN * was, SLACK.get(field.name, 0))
        }


def deviations(case: str, costs: Costs) -> dict[str, tuple[int, int]]:
    """Return name -> (measured, recorded) for the costs of a case that differ by more than the margin."""
    written = json.loads(WRITTEN.read_text())
    if os.environ.get(REWRITE):
        if case not in written or costs.unlike(Costs(**written[case])):
            WRITTEN.write_text(json.dumps(written | {case: asdict(costs)}, indent=2) + "\n")
        return {}
    return costs.unlike(Costs(**written[case]))


class CountedCursor(Cursor):
    """psycopg cursor that counts all statements sent with cursors of its class."""

    sent = 0

    def execute(self, query: Any, vars: Any = None) -> None:
        CountedCursor.sent += 1
        super().execute(query, vars)


class Meter:
    """Reader of the costs so far.

    Parameters:
      admin: A connection of another session, to a server without other load.
      client: A connected client of such a Redis server.
    """

    def __init__(self, admin: Connection, client: redis.Redis) -> None:
        self._admin = admin
        self._client: Any = client
        self._own = 0
        self._vacuum_catalogs()
        self._before = self._read()

    def costs(self) -> Costs:
        """Return the costs since the meter was created."""
        now = self._read()
        return Costs(*(after - before for after, before in zip(astuple(now), astuple(self._before), strict=True)))

    def _vacuum_catalogs(self) -> None:
        """Remove what earlier tests left in the catalogs; a statement that reads their pages would prune them."""
        with self._admin.cursor() as cursor:
            cursor.execute(
                "SELECT string_agg(format('pg_catalog.%I', tablename), ', ') FROM pg_tables "
                "WHERE schemaname = 'pg_catalog'"
            )
            row: Any = cursor.fetchone()
            cursor.execute(f"VACUUM {row[0]}")

    def _read(self) -> Costs:
        info = self._client.info("all")
        named = sum(counts["calls"] for name, counts in info.items() if name.startswith("cmdstat_client"))
        commands = info["total_commands_processed"] - named - self._own
        self._own += 1  # this query itself
        with self._admin.cursor() as cursor:
            # The next transaction id: unlike the current one, it can be read without assigning one.
            cursor.execute(
                "SELECT pg_snapshot_xmax(pg_current_snapshot())::text::bigint, "
                "pg_wal_lsn_diff(pg_current_wal_insert_lsn(), '0/0')::bigint"
            )
            row: Any = cursor.fetchone()
        return Costs(CountedCursor.sent, row[0], row[1], commands)
