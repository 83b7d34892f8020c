"""Row counts before a run, bounded in rows and in time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime, timedelta
from typing import Any, Final

from peewee import PeeweeException

from housekeeping.core.sanitize import error_line
from housekeeping.database.connection import database, sqlstate
from housekeeping.database.errors import is_unavailable
from housekeeping.database.time_limit import time_limit
from housekeeping.sweeps.stages.stage import Backlog, Stage

#: Time limit of a count, and the largest part of the run's time (1/4) that it may take.
_MAX_COUNT_TIME: Final = timedelta(seconds=5)
_PART_OF_RUN: Final = 4
#: SQLSTATEs: statement timeout, lock timeout.
_TIMED_OUT: Final = ("57014", "55P03")

_ROWS: Final = """
WITH RECURSIVE tables (id) AS (
    SELECT to_regclass(name)::oid FROM unnest(%s::text[]) AS name
    UNION SELECT inhrelid FROM tables JOIN pg_inherits ON inhparent = tables.id
)
SELECT CASE WHEN min(reltuples) >= 0 AND sum(reltuples) > 0 THEN sum(reltuples)::bigint END
FROM tables JOIN pg_class ON pg_class.oid = tables.id WHERE relkind <> 'p'
"""


class CountFailed(Exception):
    """A count that timed out or was rejected by PostgreSQL.

    Attributes:
      timed_out: Whether it took too long or waited too long for a lock.
    """

    def __init__(self, error: PeeweeException) -> None:
        super().__init__(error_line(error))
        self.timed_out = sqlstate(error) in _TIMED_OUT


def count_stale(stages: Sequence[Stage], now: datetime, limit: int, argument: Any, max_runtime: timedelta) -> Backlog:
    """Count the stale rows, no further than the limit for each stage.

    Raises:
      CountFailed: The count took too long or PostgreSQL rejected it.
      peewee.PeeweeException: The database does not answer.
    """
    with _bounded(max_runtime):
        stale = Backlog(0)
        for each in stages:
            stale += each.backlog(now, limit, argument)
        return stale


def count_rows(table: str, limit: int, max_runtime: timedelta) -> int:
    """Count the rows of a table, up to the limit.

    Parameters:
      table: Its name, quoted for SQL.

    Raises:
      CountFailed, peewee.PeeweeException: As `count_stale`.
    """
    with _bounded(max_runtime):
        (rows,) = database.execute_sql(
            f"SELECT count(*) FROM (SELECT 1 FROM {table} LIMIT %s) AS counted",  # noqa: S608 - quoted by the caller
            (limit,),
        ).fetchone()
        return int(rows)


def estimated_rows(tables: Sequence[str]) -> int | None:
    """Return the tables' rows by PostgreSQL's statistics; None if one was never analyzed."""
    if not tables:
        return None
    (rows,) = database.execute_sql(_ROWS, (list(tables),)).fetchone()
    return None if rows is None else int(rows)


@contextmanager
def _bounded(max_runtime: timedelta) -> Iterator[None]:
    try:
        with time_limit(min(_MAX_COUNT_TIME, max_runtime / _PART_OF_RUN)):
            yield
    except PeeweeException as error:
        if is_unavailable(error):
            raise
        raise CountFailed(error) from error
