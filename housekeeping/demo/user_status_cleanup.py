"""Sample user statuses: due, due later, never due, and some that another session has locked."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from housekeeping.database.catalog import quoted_name
from housekeeping.database.connection import database
from housekeeping.workers.user_status_cleanup.models import UserStatus

TITLE: Final = "USER STATUSES"
DUE: Final = 40_000
LATER: Final = 12_000
NEVER: Final = 3_000
LOCKED: Final = 250

#: Due over the last two days. Later ones become due from now on, one after another.
_SEED: Final = """
INSERT INTO {table} (user_id, emoji, message, clear_status_at)
SELECT n,
       (ARRAY['palm_tree', 'calendar', 'coffee', 'house', 'face_with_thermometer'])[1 + n %% 5],
       (ARRAY['On holiday', 'In a meeting', 'Back soon', 'Working from home', 'Off sick'])[1 + n %% 5],
       CASE
         WHEN n <= %(due)s THEN now() - interval '2 days' * (n::float / %(due)s)
         WHEN n <= %(due)s + %(later)s THEN now() + %(every)s::interval * (n - %(due)s)
       END
FROM generate_series(1, %(due)s + %(later)s + %(never)s) AS n
"""
#: Locks some due statuses, like a session that is editing them.
LOCK: Final = f"SELECT user_id FROM user_statuses WHERE user_id % 160 = 1 AND user_id <= {DUE} FOR UPDATE"  # noqa: S608
_COUNT: Final = """
SELECT count(*) FILTER (WHERE clear_status_at <= now()),
       count(*) FILTER (WHERE clear_status_at > now()),
       count(*) FILTER (WHERE clear_status_at IS NULL)
FROM user_statuses
"""


def seed(folder: Path) -> str:
    """Fill the table in under a second; return a summary line."""
    fill(DUE, LATER, NEVER, every="100 milliseconds")
    database.execute_sql("ANALYZE user_statuses")
    return (
        f"{DUE + LATER + NEVER:,} user statuses: {DUE:,} due, {LATER:,} due later, {NEVER:,} never; "
        f"{LOCKED} of those due are locked by another session"
    )


def fill(due: int, later: int, never: int, *, every: str) -> None:
    """Add statuses of each kind to the empty table in one transaction.

    Parameters:
      every: Interval at which the later ones become due, in SQL.
    """
    with database.atomic():
        query = _SEED.format(table=quoted_name(UserStatus))
        database.execute_sql(query, {"due": due, "later": later, "never": never, "every": every})


def counted() -> dict[str, int]:
    """Return the number of statuses of each kind."""
    due, later, never = database.execute_sql(_COUNT).fetchone()
    return {f"due ({LOCKED} locked by another session)": due, "due later": later, "never due": never}
