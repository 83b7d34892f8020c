"""Errors by cause: the failed runs, the rejected rows and the dead letters of the last hours, each cause once.

Also finds the row for which a predicate fails.

Errors are of one cause if they are equal without ids, numbers, paths and quoted values. The cause is that of the
innermost error: "connection refused", and not the "could not send the report" that was raised because of it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, Final

from peewee import SQL, PeeweeException, Select, fn

from housekeeping.brokers.dead_letters import DeadLetterStore, LetterFilter, search
from housekeeping.core.errors import DatabaseUnavailable, HousekeepingError
from housekeeping.core.logs import error_line, in_one_line, mask_secrets
from housekeeping.core.settings import MAIN
from housekeeping.database.catalog import quoted_name
from housekeeping.database.connection import LOCK_TIME, STATEMENT_TIME, database, time_limit, translate_postgres_errors
from housekeeping.database.errors import DIRECT_CAUSE, Kind, error_in, is_unavailable, kind_of, without_values
from housekeeping.ledger.schema import Run, name_database, run_label
from housekeeping.sweeps.table_stage import TableStage

#: The longest time that is shown. Dead letters are kept for a week.
LONGEST: Final = timedelta(days=7)
_RUNS: Final = 5_000  # runs of each database, the newest ones
_LETTERS: Final = 5_000
_SEARCH: Final = timedelta(seconds=1)
_SHOWN: Final = 100  # causes
_WIDTH: Final = 300  # characters of a text
_NAMES: Final = 5  # workers and actors of a cause, named one by one

#: The end of the innermost error's traceback is enough: its last lines are the error's text. A lost run could not write
#: its error; that the server was started since its last heartbeat explains it.
_TROUBLED: Final = """
WITH troubled AS (
    SELECT id, worker, started_at, outcome, traceback, rejected, coalesce(error, CASE
            WHEN outcome <> 'lost' OR reason <> 'taken_over' THEN reason
            WHEN pg_postmaster_start_time() BETWEEN heartbeat_at AND finished_at THEN 'PostgreSQL was restarted'
            ELSE 'no heartbeat: the process died or hung' END, outcome) AS text
    FROM {table}
    WHERE started_at >= %s AND (outcome IN ('failed', 'lost', 'lost_lease') OR rejected IS NOT NULL)
    ORDER BY started_at DESC LIMIT %s
), found AS (
    SELECT worker, id, started_at, 0 AS rows, text,
        right(split_part(traceback, %s, 1), 2000) AS traceback
    FROM troubled WHERE outcome IN ('failed', 'lost', 'lost_lease')
    UNION ALL
    SELECT worker, id, started_at, (cause ->> 'rows')::bigint, cause ->> 'cause', NULL
    FROM troubled CROSS JOIN jsonb_array_elements(rejected) AS cause
)
SELECT worker, text, traceback, sum(rows)::bigint, count(*) FILTER (WHERE rows = 0), min(started_at), max(started_at),
    max(id), (SELECT count(*) FROM troubled)
FROM found GROUP BY worker, text, traceback ORDER BY max(started_at) DESC
"""


@dataclass(slots=True)
class Cause:
    """One cause, and what failed because of it.

    Attributes:
      cause: The innermost error without the parts that differ from one to the next.
      example: The last error as it was.
      rows, runs, dead_letters: How many of each failed.
      of: The workers and actors.
      run_id: The last run, in the database of this name; None if only messages failed.
      message_id: The last dead letter; None without one.
    """

    cause: str
    example: str
    first_at: datetime
    last_at: datetime
    rows: int = 0
    runs: int = 0
    dead_letters: int = 0
    of: list[str] = field(default_factory=list)
    run_id: int | None = None
    database: str = MAIN
    message_id: str | None = None

    def as_json(self) -> dict[str, Any]:
        """Return one element of ``causes`` in ``housekeeping errors --json``."""
        numbers = {"rows": self.rows, "runs": self.runs, "dead_letters": self.dead_letters}
        names = ("cause", "example", "first_at", "last_at", "of", "run_id", "message_id")
        values = {**{name: getattr(self, name) for name in names}, "counts": numbers}
        return name_database(values, self.database)

    @property
    def last_run(self) -> str | None:
        """Label of the last run; None if only messages failed."""
        return None if self.run_id is None else run_label(self.run_id, self.database)

    @property
    def subjects(self) -> str:
        """The workers and actors in one line."""
        more = len(self.of) - _NAMES
        return ", ".join([*self.of[:_NAMES], *([f"{more} more"] if more > 0 else [])])


@dataclass(slots=True)
class Causes:
    """The causes of the errors since a time, the latest first.

    Attributes:
      incomplete: What is missing, and why; empty if nothing is.
    """

    since: datetime
    causes: Sequence[Cause] = ()
    incomplete: list[str] = field(default_factory=list)


def read_causes(names: Sequence[str], store: DeadLetterStore | None, since: datetime) -> Causes:
    """Return the causes of the errors since a time, with one query for each database and one search of the broker.

    Parameters:
      store: The dead letters; None to leave them out.
    """
    read, by_cause = Causes(since), dict[str, Cause]()
    for name in names:
        try:
            with database.using(name), translate_postgres_errors(), time_limit(STATEMENT_TIME, LOCK_TIME):
                table = f'"{Run._meta.schema}"."{Run._meta.table_name}"'
                rows = database.execute_sql(_TROUBLED.format(table=table), (since, _RUNS, DIRECT_CAUSE)).fetchall()
        except DatabaseUnavailable as error:
            read.incomplete.append(f"runs are missing: {error_line(error)}")
            continue
        if rows and rows[0][-1] == _RUNS:
            read.incomplete.append(f"only the last {_RUNS:,} runs with an error are shown")
        for worker, text, traceback, failed_rows, runs, first, last, run_id, _ in rows:
            line = text if traceback is None else error_in(traceback) or text
            cause = text if failed_rows else without_values(line)
            found = _add(by_cause, cause, line, worker, first, last)
            found.rows, found.runs = found.rows + failed_rows, found.runs + runs
            if found.last_at == last:
                found.run_id, found.database = run_id, name
    if store is not None:
        _add_letters(by_cause, store, read)
    read.causes = sorted(by_cause.values(), key=lambda each: each.last_at, reverse=True)
    if len(read.causes) > _SHOWN:
        read.incomplete.append(f"{len(read.causes) - _SHOWN:,} older causes are not shown")
        read.causes = read.causes[:_SHOWN]
    return read


def _add_letters(by_cause: dict[str, Cause], store: DeadLetterStore, read: Causes) -> None:
    try:
        page = search(store, LetterFilter(since=read.since), _LETTERS, max_time=_SEARCH)
    except HousekeepingError as error:
        read.incomplete.append(f"dead letters are missing: {error_line(error)}")
        return
    for letter in page.letters:
        line, at = letter.error or "no error is known", letter.died_at
        actor = letter.message.actor_name if letter.message else "(unreadable)"
        assert at is not None  # the filter leaves out letters without a time
        found = _add(by_cause, without_values(line), line, actor, at, at)
        found.dead_letters += 1
        if found.last_at == at:
            found.message_id = letter.id
    if page.older is not None:
        read.incomplete.append(f"only the last {page.searched:,} dead letters were searched")


def _add(by_cause: dict[str, Cause], cause: str, line: str, of: str, first: datetime, last: datetime) -> Cause:
    """Return the cause with these times and this worker or actor added."""
    example = in_one_line(mask_secrets(line), _WIDTH)
    found = by_cause.setdefault(cause, Cause(cause, example, first, last))
    if last > found.last_at:
        found.example = example
    found.first_at, found.last_at = min(found.first_at, first), max(found.last_at, last)
    if (name := in_one_line(of, _WIDTH)) not in found.of:
        found.of.append(name)
    return found


#: More rows than the largest page of a table has.
_ON_A_PAGE: Final = 2048
_FIND: Final = timedelta(seconds=5)


def failing_row(stage: TableStage, now: datetime) -> str | None:
    """Return the row for which the predicate of a stage raises an error: ``for the row id 4711``; None if unknown.

    This is a binary search that reads the table about twice. It gives up on tables that take too long.

    Raises:
      peewee.PeeweeException: The database does not answer.
    """
    end = time.monotonic() + _FIND.total_seconds()
    try:
        with time_limit(STATEMENT_TIME, LOCK_TIME):
            pages = "SELECT pg_relation_size(%s::regclass) / current_setting('block_size')::bigint"
            low, high = 0, _ON_A_PAGE * database.execute_sql(pages, (quoted_name(stage.model),)).fetchone()[0]
            while high - low > 1 and time.monotonic() < end:
                middle = (low + high) // 2
                low, high = (low, middle) if _fails_within(stage, now, low, middle) else (middle, high)
            if high - low != 1 or not _fails_within(stage, now, low, high):
                return None
            key: Any = stage.model.select(*stage.key).where(SQL("ctid = %s::tid", (_place(low),)))
            row = key.tuples().get_or_none(database)
    except PeeweeException as error:
        if is_unavailable(error):
            raise
        return None
    named = zip(stage.key, row or (), strict=False)
    return f"for the row {', '.join(f'{column.column_name} {value}' for column, value in named)}" if row else None


def _fails_within(stage: TableStage, now: datetime, low: int, high: int) -> bool:
    # PostgreSQL evaluates the cheap condition first, so the predicate sees no other row.
    within = SQL("ctid >= %s::tid AND ctid < %s::tid", (_place(low), _place(high)))
    rows = stage.model.select(SQL("1")).where(within, stage.stale(now))
    try:
        with database.atomic():
            Select((rows,), [fn.COUNT(SQL("1"))]).tuples().execute(database)
    except PeeweeException as error:
        if kind_of(error) is not Kind.ROW:
            raise
        return True
    return False


def _place(number: int) -> str:
    return f"({number // _ON_A_PAGE},{number % _ON_A_PAGE})"
