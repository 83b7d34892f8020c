"""Outbox: event rows stored in the transaction of their change, and delivered until a handler succeeds.

A process claims a row before delivery by postponing its next attempt, later each time. So no lock is held while the
handler runs, and rows that a killed process had claimed become due again for another one.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from datetime import date, datetime, timedelta
from enum import Enum
from typing import Any, Final

from blinker import NamedSignal
from peewee import fn

from housekeeping.core.events import EventRow, OutboxHandler, handlers_of, subscriptions
from housekeeping.core.logs import error_line
from housekeeping.database.catalog import quoted_name
from housekeeping.database.connection import database
from housekeeping.ledger.schema import NOW, OutboxRow

#: Delay before the second delivery. It doubles before each further one, plus up to half of it at random.
FIRST_DELAY: Final = timedelta(minutes=1)
LONGEST_DELAY: Final = timedelta(hours=1)
#: A row due for longer has no handler in any process that runs the outbox sweep.
OVERDUE: Final = timedelta(minutes=10)
#: Rows with more attempts are delivered alone, because one of them may kill its process each time.
_MAX_GROUPED_ATTEMPTS: Final = 2

_STORE: Final = """
INSERT INTO {table} (event, subscription, worker, run_id, contents, attempts, due_at)
SELECT %s, %s, %s, %s, value, %s, clock_timestamp() + %s
FROM json_array_elements(%s) WITH ORDINALITY ORDER BY ordinality
RETURNING *
"""
_CLAIM: Final = """
WITH picked AS MATERIALIZED (
    SELECT id FROM {table} WHERE event = %s AND subscription = %s AND due_at <= clock_timestamp()
    ORDER BY due_at, id LIMIT %s FOR UPDATE SKIP LOCKED
)
UPDATE {table} SET attempts = attempts + 1,
    due_at = clock_timestamp() + least(%s, %s * power(2, least(attempts, 20))) * (1 + random() / 2)
WHERE id = ANY (ARRAY (SELECT id FROM picked))
RETURNING *
"""


def store_in_outbox(
    event: NamedSignal, rows: Sequence[EventRow], *, worker: str, run_id: int | None, claimed: bool = True
) -> list[OutboxRow]:
    """Store the rows once for each subscription of the event, and return them. Call it within a transaction.

    Parameters:
      claimed: Whether this process delivers the rows after the commit; otherwise they are due at once.
    """
    stored: list[OutboxRow] = []
    if not rows:
        return stored
    # Read again, because JSON has no numbers NaN and Infinity: they become text.
    contents = json.dumps(json.loads(json.dumps([dict(row) for row in rows], default=_plain), parse_constant=str))
    attempts, delay = (1, FIRST_DELAY) if claimed else (0, timedelta())
    for name in handlers_of(event).outbox:
        values = (event.name, name, worker, run_id, attempts, delay, contents)
        stored += OutboxRow.raw(_STORE.format(table=quoted_name(OutboxRow)), *values)
    return stored


def claim(event: str, subscription: str, limit: int) -> list[OutboxRow]:
    """Claim the subscription's due rows, skipping locked ones, the longest due first."""
    values = (event, subscription, limit, LONGEST_DELAY, FIRST_DELAY)
    with database.atomic():
        claimed: list[Any] = list(OutboxRow.raw(_CLAIM.format(table=quoted_name(OutboxRow)), *values))
    return sorted(claimed, key=lambda row: row.id)


def groups(rows: Iterable[OutboxRow]) -> list[list[OutboxRow]]:
    """Split the rows into groups, one for each call of their handler."""
    found: list[list[OutboxRow]] = []
    for row in rows:
        last = found[-1][-1] if found else None
        together = last is not None and row.attempts <= _MAX_GROUPED_ATTEMPTS and last.attempts <= _MAX_GROUPED_ATTEMPTS
        if last is not None and together and (last.worker, last.run_id) == (row.worker, row.run_id):
            found[-1].append(row)
        else:
            found.append([row])
    return found


def deliver(handler: OutboxHandler, rows: Sequence[OutboxRow]) -> None:
    """Call the handler with rows of one worker and run; its errors propagate."""
    given = [{**row.contents, "delivery_id": row.id} for row in rows]
    handler(given, worker=rows[0].worker, run_id=rows[0].run_id)


def remove(rows: Sequence[OutboxRow]) -> None:
    """Delete delivered rows."""
    if rows:
        OutboxRow.delete().where(OutboxRow.id.in_([row.id for row in rows])).execute()


def note_failures(failures: Iterable[tuple[OutboxRow, BaseException]]) -> None:
    """Record why rows could not be delivered; claiming has already set their next attempt."""
    for row, error in failures:
        OutboxRow.update(error=error_line(error)).where(OutboxRow.id == row.id).execute()


def release(rows: Sequence[OutboxRow]) -> None:
    """Make claimed rows due again, without counting the attempt."""
    if rows:
        claimed = OutboxRow.id.in_([row.id for row in rows])
        OutboxRow.update(attempts=OutboxRow.attempts - 1, due_at=NOW).where(claimed).execute()


def without_handler(limit: int) -> dict[tuple[str, str], int]:
    """Count overdue rows, up to a limit, of subscriptions that have no handler in this process."""
    overdue = OutboxRow.select(OutboxRow.event, OutboxRow.subscription).where(OutboxRow.due_at < NOW - OVERDUE)
    for event, name in subscriptions():
        overdue = overdue.where((OutboxRow.event != event) | (OutboxRow.subscription != name))
    some = overdue.limit(limit).alias("some")
    key = (some.c.event, some.c.subscription)
    query: Any = some.select_from(*key, fn.COUNT(some.c.event)).group_by(*key).tuples()
    return {(event, name): number for event, name, number in query}


def _plain(value: Any) -> Any:
    """Return a value that JSON lacks as text, or an enumeration as its value."""
    if isinstance(value, datetime | date):
        return value.isoformat()
    if isinstance(value, Enum):
        return value.value
    return value.hex() if isinstance(value, bytes | memoryview) else str(value)
