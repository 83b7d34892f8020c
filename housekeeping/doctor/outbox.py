"""Check of the outbox for rows that no process delivers and for failing deliveries."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from housekeeping.core.settings import Settings
from housekeeping.core.wording import counted
from housekeeping.database.connection import database
from housekeeping.sweeps.declaration import Sweep
from housekeeping.sweeps.insight.diagnostics import Finding
from housekeeping.sweeps.ledger.models import OutboxRow
from housekeeping.sweeps.ledger.outbox import OVERDUE

#: A row with so many attempts has waited for half an hour.
_MANY: Final = 6
_EXAMINED: Final = 10_000  # rows

_SUMMARY: Final = """
SELECT event, subscription,
    count(*) FILTER (WHERE due_at < clock_timestamp() - %s),
    count(*) FILTER (WHERE attempts >= %s), max(attempts), max(error) FILTER (WHERE attempts >= %s)
FROM (SELECT * FROM {table} ORDER BY id LIMIT %s) AS first GROUP BY event, subscription ORDER BY 1, 2
"""


def examine(settings: Settings, sweeps: dict[str, Sweep]) -> Iterator[Finding]:
    """Yield findings about the oldest rows. Handlers are in other processes, so only the rows can be examined."""
    meta: Any = OutboxRow._meta
    table = f'"{meta.schema}"."{meta.table_name}"'
    if database.execute_sql("SELECT to_regclass(%s)", (table,)).fetchone()[0] is None:
        return  # another check reports the missing schema
    summaries = database.execute_sql(_SUMMARY.format(table=table), (OVERDUE, _MANY, _MANY, _EXAMINED)).fetchall()
    healthy = True
    for event, name, overdue, failing, attempts, error in summaries:
        if overdue:
            healthy = False
            yield Finding(
                "error",
                "postgres",
                "outbox",
                f"{counted(overdue, 'row')} of {event}: no process delivers to the subscription {name!r}",
                "import the module with its events.on(...) where housekeeping.outbox runs; if the handler was removed, "
                f"delete its rows from {table}",
            )
        elif failing:
            healthy = False
            yield Finding(
                "warning",
                "postgres",
                "outbox",
                f"{counted(failing, 'row')} of {event} could not be delivered to {name!r} for "
                f"{counted(attempts, 'time')}: {error}",
                "repair the handler; each row is retried once an hour",
            )
    if healthy:
        yield Finding("fine", "postgres", "outbox", "no overdue rows")
