"""Health of the database that a run could harm: replication lag, waiting locks, vacuum."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from peewee import PeeweeException

from housekeeping.core.sanitize import error_line
from housekeeping.database.connection import database


@dataclass(frozen=True, slots=True)
class DbHealth:
    """Health signals at one moment; None if unknown.

    Attributes:
      replication_lag_s: Replay lag of the slowest standby in seconds; 0 without standbys.
      waiting_locks: Sessions that wait for any lock while they hold or request one on the tables.
      vacuum: Whether a vacuum of one of the tables is running.
      trouble: Why nothing is known.
    """

    replication_lag_s: float | None = None
    waiting_locks: int | None = None
    vacuum: bool | None = None
    trouble: str | None = None


#: Returns the current health for these quoted tables. Errors do not raise; the signals are then None.
HealthSource = Callable[[Sequence[str]], DbHealth]

#: One statement without locks of its own, because it runs while the database is overloaded. A role without pg_monitor
#: sees the rows of the two statistics views, but NULL in their columns.
_LOOK: Final = """
WITH RECURSIVE tables (id) AS (
    SELECT to_regclass(name)::oid FROM unnest(%s::text[]) AS name
    UNION SELECT inhrelid FROM tables JOIN pg_inherits ON inhparent = tables.id
), here AS (
    SELECT oid FROM pg_database WHERE datname = current_database()
), waiting AS (
    SELECT pid FROM pg_locks GROUP BY pid HAVING bool_or(NOT granted)
    AND bool_or(relation IN (SELECT id FROM tables) AND database = (SELECT oid FROM here))
)
SELECT
    (SELECT CASE WHEN count(*) > count(state) THEN NULL ELSE coalesce(max(extract(epoch FROM replay_lag)), 0) END
     FROM pg_stat_replication),
    (SELECT count(*) FROM waiting),
    (SELECT CASE WHEN bool_or(relid IN (SELECT id FROM tables)) THEN true WHEN count(*) > count(relid) THEN NULL
     ELSE false END FROM pg_stat_progress_vacuum WHERE datid = (SELECT oid FROM here))
"""


def read_health(tables: Sequence[str]) -> DbHealth:
    """Return the health signals from PostgreSQL's statistics views, on the library's connection; a `HealthSource`."""
    try:
        row: Any = database.execute_sql(_LOOK, (list(tables),)).fetchone()
    except PeeweeException as error:
        return DbHealth(trouble=error_line(error))
    lag, waiting, vacuum = row
    return DbHealth(None if lag is None else float(lag), waiting, vacuum)
