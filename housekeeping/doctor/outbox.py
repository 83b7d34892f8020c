"""The outbox: rows that no process delivers, and deliveries that keep failing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from housekeeping.core.plural import counted
from housekeeping.core.settings import Settings
from housekeeping.database.connection import database
from housekeeping.sweeps.declaration import Sweep
from housekeeping.sweeps.insight.diagnostics import Finding
from housekeeping.sweeps.ledger.models import OutboxRow
from housekeeping.sweeps.ledger.outbox import OVERDUE

#: Attempts after which a row has waited for half an hour.
_MANY: Final = 6
_LOOKED_AT: Final = 10_000

_WAITING: Final = """
SELECT event, subscription,
    count(*) FILTER (WHERE due_at < clock_timestamp() - %s),
    count(*) FILTER (WHERE attempts >= %s), max(attempts), max(error) FILTER (WHERE attempts >= %s)
FROM (SELECT * FROM {table} ORDER BY id LIMIT %s) AS first GROUP BY event, subscription ORDER BY 1, 2
"""


def examine(settings: Settings, sweeps: dict[str, Sweep]) -> Iterator[Finding]:
    """Look at the oldest rows; the handlers are those of other processes, so that only the rows can tell."""
    meta: Any = OutboxRow._meta
    table = f'"{meta.schema}"."{meta.table_name}"'
    if database.execute_sql("SELECT to_regclass(%s)", (table,)).fetchone()[0] is None:
        return  # that the schema is missing is found elsewhere
    found = database.execute_sql(_WAITING.format(table=table), (OVERDUE, _MANY, _MANY, _LOOKED_AT)).fetchall()
    wrong = False
    for event, name, overdue, failing, attempts, error in found:
        if overdue:
            wrong = True
            yield Finding(
                "error",
                "postgres",
                "outbox",
                f"{counted(overdue, 'row')} of {event}: no process delivers to the subscription {name!r}",
                "import the module with its events.on(...) where housekeeping.outbox runs; if the handler is gone for "
                f"good, delete its rows from {table}",
            )
        elif failing:
            wrong = True
            yield Finding(
                "warning",
                "postgres",
                "outbox",
                f"{counted(failing, 'row')} of {event} could not be delivered to {name!r} for "
                f"{counted(attempts, 'time')}: {error}",
                "mend the handler; each row is tried once an hour",
            )
    if not wrong:
        yield Finding("fine", "postgres", "outbox", "nothing waits longer than it should")
