"""Shorter time limits for statements that a person or a run waits for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Final

from housekeeping.database.connection import database

#: Limits for a command or page that shows many workers, where one of them must not delay the others. A bounded count by
#: an index takes milliseconds; a table that is locked for longer is locked by a person or a migration.
STATEMENT_TIME: Final = timedelta(seconds=2)
LOCK_TIME: Final = timedelta(seconds=0.3)

#: Keeps shorter limits of the session.
_SHORTEN: Final = """
SELECT set_config(name, least(nullif(setting::bigint, 0), ms)::text, true)
FROM pg_settings JOIN (VALUES ('statement_timeout', %s), ('lock_timeout', %s)) AS given (name, ms) USING (name)
"""


@contextmanager
def time_limit(statement: timedelta, lock: timedelta | None = None) -> Iterator[None]:
    """Run the block in a transaction with limits for each statement, and for each wait for a lock (default: the same).

    A statement that takes longer raises peewee's error for SQLSTATE 57014, a longer wait the one for 55P03.
    """
    with database.atomic():
        shorten_time_limits(statement, lock)
        yield


def shorten_time_limits(statement: timedelta, lock: timedelta | None = None) -> None:
    """Lower the limits for the rest of the open transaction, as `time_limit` does."""
    database.execute_sql(_SHORTEN, [round(each.total_seconds() * 1000) for each in (statement, lock or statement)])
