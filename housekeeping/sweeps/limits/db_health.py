"""How the database is, as far as a run of ours may harm it: replication, waiting locks, vacuum."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from peewee import PeeweeException

from housekeeping.core.sanitize import error_line
from housekeeping.database.connection import database


@dataclass(frozen=True, slots=True)
class DbHealth:
    """What was seen at one moment; null: it cannot be seen.

    Attributes:
      replication_lag_s: Seconds by which the standby that is farthest behind lags in replaying; 0 without standbys.
      waiting_locks: Sessions that wait for a lock and have one of the tables in hand, or wait for just that.
      vacuum: Whether a vacuum works on one of the tables.
      trouble: Why nothing could be seen.
    """

    replication_lag_s: float | None = None
    waiting_locks: int | None = None
    vacuum: bool | None = None
    trouble: str | None = None


class HealthSource(Protocol):
    """Where the signs come from."""

    def look(self, tables: Sequence[str]) -> DbHealth:
        """The signs now, for these tables by their quoted names; never raises for what cannot be seen."""


#: One statement, and no lock but those of pg_locks itself: it must be cheap just when the database is not well. A role
#: without pg_monitor sees the rows of the two statistics views, and nothing in them.
_LOOK: Final = """
WITH RECURSIVE ours (id) AS (
    SELECT to_regclass(name)::oid FROM unnest(%s::text[]) AS name
    UNION SELECT inhrelid FROM ours JOIN pg_inherits ON inhparent = ours.id
), here AS (
    SELECT oid FROM pg_database WHERE datname = current_database()
), waiting AS (
    SELECT pid FROM pg_locks GROUP BY pid HAVING bool_or(NOT granted)
    AND bool_or(relation IN (SELECT id FROM ours) AND database = (SELECT oid FROM here))
)
SELECT
    (SELECT CASE WHEN count(*) > count(state) THEN NULL ELSE coalesce(max(extract(epoch FROM replay_lag)), 0) END
     FROM pg_stat_replication),
    (SELECT count(*) FROM waiting),
    (SELECT CASE WHEN bool_or(relid IN (SELECT id FROM ours)) THEN true WHEN count(*) > count(relid) THEN NULL
     ELSE false END FROM pg_stat_progress_vacuum WHERE datid = (SELECT oid FROM here))
"""


class PostgresHealth:
    """The signs by PostgreSQL's own views, on the library's connection."""

    def look(self, tables: Sequence[str]) -> DbHealth:
        try:
            row: Any = database.execute_sql(_LOOK, (list(tables),)).fetchone()
        except PeeweeException as error:
            return DbHealth(trouble=error_line(error))
        lag, waiting, vacuum = row
        return DbHealth(None if lag is None else float(lag), waiting, vacuum)


POSTGRES_HEALTH: Final[HealthSource] = PostgresHealth()


def table_name(model: Any) -> str:
    """The table's name as SQL has it, quoted."""
    parts = (model._meta.schema, model._meta.table_name)
    return ".".join('"' + part.replace('"', '""') + '"' for part in parts if part)
