"""Past runs in the ledger: a worker's last runs, the attempts of a message, and pages of all runs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from datetime import datetime
from typing import Any, Final

from peewee import SQL, Expression, Tuple

from housekeeping.core.clock import SYSTEM_CLOCK
from housekeeping.core.errors import DatabaseUnavailable
from housekeeping.core.logs import format_duration
from housekeeping.core.settings import MAIN
from housekeeping.database.connection import LOCK_TIME, STATEMENT_TIME, database, time_limit, translate_postgres_errors
from housekeeping.database.queries import database_now
from housekeeping.ledger import runs
from housekeeping.ledger.runs import HEARTBEAT, PREDICATE, SILENCE
from housekeeping.ledger.schema import NEWEST_FIRST, NOW, Run, name_database, newest, run_label

_ATTEMPTS: Final = 100  # of one message; its retries are 25
_OPEN: Final = 100  # open runs of a worker that are read; fewer threads run it at once
#: Columns that only the page of one run shows, because they may be long, or that only the coverage reads.
_LEFT_OUT: Final = ("traceback", "rejected", "oldest_at")
_NEVER_BEGAN: Final = ("skipped", "missed")
#: Time since the last heartbeat after which a run is shown as silent. The next one may be late by a slow statement.
_LATE: Final = 1.5 * HEARTBEAT


@dataclass(frozen=True, slots=True)
class RunRecord:
    """One row of the ledger.

    Attributes:
      outcome: None while the run is open, or after its process died.
      silent_s: Seconds since the last heartbeat of an open run.
      lost: Whether the run is open and has missed three heartbeats.
      backlog: Stale rows at its end, counted up to a limit; None if not counted.
      host, pid: The process that runs it, or that recorded a skipped or missed tick.
      stopped_by: The operator who asked it to stop after its batch.
    """

    run_id: int
    worker: str
    trigger: str
    tick: datetime | None
    message_id: str | None
    epoch: int | None
    started_at: datetime
    heartbeat_at: datetime
    finished_at: datetime | None
    outcome: str | None
    reason: str | None
    counts: dict[str, Any]
    cursor: dict[str, Any] | None
    error: str | None
    backlog: int | None
    backlog_exact: bool | None
    silent_s: float | None
    lost: bool
    host: str | None = None
    pid: int | None = None
    stopped_by: str | None = None
    database: str = MAIN

    @property
    def label(self) -> str:
        """The run's label, see `run_label`."""
        return run_label(self.run_id, self.database)

    @property
    def is_silent(self) -> bool:
        """Whether the run is open and its heartbeat is late: its process may be dead."""
        return self.silent_s is not None and self.silent_s > _LATE.total_seconds()

    @property
    def process(self) -> str | None:
        """Host and process id; None if unknown."""
        return None if self.host is None else f"{self.host}:{self.pid}"

    @property
    def duration_s(self) -> float | None:
        """Duration in seconds; None while the run is open."""
        return None if self.finished_at is None else (self.finished_at - self.started_at).total_seconds()

    def as_json(self) -> dict[str, Any]:
        """Return one element of ``runs`` in ``housekeeping runs --json``."""
        names = [name for name in self.__slots__ if name not in ("silent_s", "lost", "database")]
        values = {name: getattr(self, name) for name in names}
        times = {"duration_s": self.duration_s, "heartbeat_age_s": self.silent_s}
        state = {"silent": self.is_silent, "maybe_lost": self.lost}
        return name_database({**values, **times, **state}, self.database)


def recent(worker: str, limit: int) -> list[RunRecord]:
    """Return the worker's last runs, newest first."""
    return _records(Run.worker == worker, order=Run.id.desc(), limit=limit)


def last_ended(worker: str, limit: int) -> list[RunRecord]:
    """Return the worker's last runs that began and ended, oldest first."""
    ended = (Run.worker == worker) & Run.outcome.not_in(_NEVER_BEGAN)
    return _records(ended, order=NEWEST_FIRST, limit=limit)[::-1]


@dataclass(frozen=True, slots=True)
class WorkerRuns:
    """The runs that determine the status of a worker.

    Attributes:
      ended: The last ones that began and ended, oldest first.
      open_runs: The open ones, oldest first, up to a limit.
      unconfirmed: The newest one that was skipped for lack of a confirmation, if no run has ended since.
      succeeded_at: The end of the last one that reached its end or its limits; None without one.
      attempted_at: When one last began or was held back. If there is none, the time of the first missed or skipped
        tick; None without any row.
    """

    ended: list[RunRecord] = field(default_factory=list)
    open_runs: list[RunRecord] = field(default_factory=list)
    unconfirmed: RunRecord | None = None
    succeeded_at: datetime | None = None
    attempted_at: datetime | None = None


#: MATERIALIZED, because the ids are used twice. -id as in `NEWEST_FIRST`.
_OF_WORKERS: Final = """
WITH known AS MATERIALIZED (
    SELECT name, ARRAY(
        SELECT id FROM {runs} WHERE worker = name AND outcome NOT IN ('skipped', 'missed') ORDER BY -id LIMIT most
    ) AS ended
    FROM unnest(%s::text[], %s::integer[]) AS given (name, most)
)
SELECT name,
    ended || ARRAY(SELECT id FROM {runs} WHERE worker = name AND outcome IS NULL ORDER BY id LIMIT %s) || ARRAY(
        SELECT id FROM {runs} WHERE worker = name AND reason = %s AND -id < -coalesce(ended[1], 0)
        ORDER BY -id LIMIT 1
    ),
    (SELECT finished_at FROM {runs} WHERE worker = name
        AND (outcome = 'done' OR outcome = 'partial' AND reason <> ALL(%s)) ORDER BY -id LIMIT 1),
    coalesce(
        (SELECT max(started_at) FROM {runs} WHERE worker = name
            AND (outcome IS NULL OR outcome NOT IN ('skipped', 'missed') OR reason = ANY(%s))),
        (SELECT min(started_at) FROM {runs} WHERE worker = name)
    )
FROM known
"""


def runs_of_workers(most: Mapping[str, int], *, unconfirmed: str, held_back: Collection[str]) -> dict[str, WorkerRuns]:
    """Return the runs that determine the status of these workers, by two statements.

    Parameters:
      most: Number of ended runs by worker.
      unconfirmed: The reason of a run that waits for a confirmation.
      held_back: Reasons of skipped runs that count as attempts.
    """
    sql = _OF_WORKERS.format(runs=f'"{Run._meta.schema}".runs')
    values = [list(most), list(most.values()), _OPEN, unconfirmed, list(runs.STOPPED), list(held_back)]
    known = database.execute_sql(sql, values).fetchall()
    wanted = [run_id for _, ids, _, _ in known for run_id in ids]
    found = {name: WorkerRuns(succeeded_at=ended, attempted_at=began) for name, _, ended, began in known}
    for row in select_runs().where(SQL("id = ANY(%s)", (wanted,))).order_by(Run.id):
        record = record_of(row)
        of_worker = found[record.worker]
        # By its current outcome, because it may have ended between the two statements.
        if record.reason == unconfirmed:
            found[record.worker] = replace(of_worker, unconfirmed=record)
        else:
            (of_worker.open_runs if record.outcome is None else of_worker.ended).append(record)
    return found


def find(run_id: int) -> RunRecord | None:
    """Return the run with this id; None if there is none."""
    return next(iter(_records(Run.id == run_id, limit=1)), None)


def stop(record: RunRecord, user: str) -> tuple[bool, str]:
    """Ask a run to stop after its batch. Return whether that is new, and the result in words.

    Raises:
      peewee.PeeweeException: The database does not answer.
    """
    is_new, by = (False, None) if record.outcome is not None else runs.request_stop(record.run_id, user)
    if is_new:
        unless_dead = f"; it is silent for {format_duration(round(record.silent_s or 0))}" if record.is_silent else ""
        return True, f"run {record.label} of {record.worker} ends after its current batch{unless_dead}"
    if by is not None:
        return False, f"run {record.label} is already ending after its current batch, asked by {by}"
    ended = record if record.outcome is not None else find(record.run_id)
    how = "" if ended is None or ended.outcome is None else f" as {ended.outcome}"
    return False, f"run {record.label} of {record.worker} has already ended{how}; nothing was stopped"


@dataclass(frozen=True, slots=True)
class RejectedRecords:
    """Records that a run rejected for one cause.

    Attributes:
      rows: Their number.
      error: The error of the first one.
      records: Some of them.
    """

    cause: str
    rows: int
    error: str
    records: list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class RunFailures:
    """What went wrong in a run.

    Attributes:
      traceback: Traceback of the error that ended it; None without an error.
      rejected: The rejected records by cause; empty while the run is open.
    """

    traceback: str | None
    rejected: Sequence[RejectedRecords]


def failures_of(run_id: int) -> RunFailures:
    """Return what went wrong in a run; nothing if no run has the id."""
    row: Any = Run.select(Run.traceback, Run.rejected).where(Run.id == run_id).tuples().first()
    text, stored = row or (None, None)
    names = [each.name for each in fields(RejectedRecords)]
    return RunFailures(text, [RejectedRecords(**{name: each[name] for name in names}) for each in stored or ()])


def attempts_of(record: RunRecord) -> list[RunRecord]:
    """Return all attempts at the run's message, oldest first; without a message, only the run itself."""
    return [record] if record.message_id is None else attempts_at(record.message_id)


def attempts_at(message_id: str) -> list[RunRecord]:
    """Return all attempts at a message, oldest first."""
    return _records(Run.message_id == message_id)


def at_tick(worker: str, tick: datetime) -> list[RunRecord]:
    """Return all attempts at a tick of the worker, oldest first."""
    return _records(Run.worker == worker, Run.tick == tick)


def took_over_from(record: RunRecord) -> list[int]:
    """Return the ids of the lost runs that this run took over from when it began."""
    if record.outcome in _NEVER_BEGAN:
        return []
    earlier = (Run.worker == record.worker) & (Run.id < record.run_id)
    before = Run.select(Run.started_at).where(earlier & began()).order_by(Run.id.desc()).limit(1).scalar()
    if before is None:
        return []
    # The lost runs were closed between the start of the previous run and the start of this one.
    closed = Run.finished_at.between(before, record.started_at) & (Run.outcome == "lost")
    rows: Any = Run.select(Run.id).where(earlier & closed).order_by(Run.id).tuples()
    return [run_id for (run_id,) in rows]


def taken_over_by(record: RunRecord) -> int | None:
    """Return the id of the run that took over from this lost run; None if there is none."""
    if record.outcome != "lost" or record.finished_at is None:
        return None
    later = (Run.worker == record.worker) & (Run.id > record.run_id) & (Run.started_at >= record.finished_at)
    found: int | None = Run.select(Run.id).where(later & began()).order_by(Run.id).limit(1).scalar()
    return found


def restarted_during(record: RunRecord) -> datetime | None:
    """Return when PostgreSQL was restarted between the last heartbeat of a lost run and its end; None if it was not."""
    if record.outcome != "lost" or record.finished_at is None:
        return None
    started_at: datetime = database.execute_sql("SELECT pg_postmaster_start_time()").fetchone()[0]
    return started_at if record.heartbeat_at <= started_at <= record.finished_at else None


def any_by_a_worker_process() -> bool:
    """Return whether the ledger has a run that a worker process carried out, not the command ``run``."""
    return bool(Run.select(Run.id).where(Run.trigger != "cli").exists())


def began() -> Any:
    """Return the condition that a run was not skipped or missed."""
    return Run.outcome.is_null() | Run.outcome.not_in(_NEVER_BEGAN)


def select_runs() -> Any:
    """Return the query that `record_of` reads."""
    columns = (each for each in Run._meta.sorted_fields if each.name not in _LEFT_OUT)
    return Run.select(*columns, NOW.alias("read_at"), (Run.heartbeat_at < NOW - SILENCE).alias("silent")).dicts()


def _records(*conditions: Any, order: Any = Run.id, limit: int = _ATTEMPTS) -> list[RunRecord]:
    return [record_of(run) for run in select_runs().where(*conditions).order_by(order).limit(limit)]


def record_of(row: dict[str, Any]) -> RunRecord:
    """Return one row of the query `select_runs`."""
    run_id, read_at, silent = (row.pop(name) for name in ("id", "read_at", "silent"))
    row["counts"] = {name: value for name, value in row["counts"].items() if name != PREDICATE}
    ended = row["outcome"] is not None
    silent_s = None if ended else (read_at - row["heartbeat_at"]).total_seconds()
    return RunRecord(run_id, **row, silent_s=silent_s, lost=not ended and silent, database=database.selected)


#: Filter value of `RunFilter.outcome` for open runs.
RUNNING: Final = "running"


@dataclass(frozen=True, slots=True)
class RunFilter:
    """Conditions that a run meets; None for any.

    Attributes:
      outcome: Its outcome; `RUNNING` for open runs.
      since: It began at this time or later.
      until: It began before this time.
    """

    worker: str | None = None
    outcome: str | None = None
    trigger: str | None = None
    since: datetime | None = None
    until: datetime | None = None


@dataclass(frozen=True, slots=True)
class RunPosition:
    """Place of a run in the list of all databases; runs that began at the same time are ordered by database and id."""

    started_at: datetime
    database: str
    run_id: int

    @classmethod
    def of(cls, record: RunRecord) -> RunPosition:
        """Return the position of this run."""
        return cls(record.started_at, record.database, record.run_id)


@dataclass(slots=True)
class RunPage:
    """One page of runs.

    Attributes:
      runs: Newest first.
      more: Whether older runs follow.
      unavailable: Why a database is missing.
      now: The time of a database that answered.
    """

    runs: Sequence[RunRecord] = ()
    more: bool = False
    unavailable: list[DatabaseUnavailable] = field(default_factory=list)
    now: datetime = field(default_factory=SYSTEM_CLOCK.now)

    @property
    def older(self) -> str | None:
        """The label of the run after which the next page continues; None if no older run follows."""
        return self.runs[-1].label if self.more else None


def read_page(
    names: Sequence[str], filter_at: Callable[[datetime], RunFilter], *, limit: int, before: RunPosition | None = None
) -> RunPage:
    """Return the runs of these databases that meet the filter. A database that does not answer hides no other one.

    Parameters:
      filter_at: Returns the filter for a database's current time.
      before: Only runs after this position in the list, for the next page.
    """
    page, found = RunPage(), list[RunRecord]()
    for name in names:
        try:
            with database.using(name), translate_postgres_errors(), time_limit(STATEMENT_TIME, LOCK_TIME):
                page.now = database_now()
                found += _runs(filter_at(page.now), before, limit + 1)
        except DatabaseUnavailable as error:
            page.unavailable.append(error)
    found.sort(key=lambda run: (run.started_at, run.database, run.run_id), reverse=True)
    page.runs, page.more = found[:limit], len(found) > limit
    return page


def _runs(wanted: RunFilter, before: RunPosition | None, limit: int) -> list[RunRecord]:
    is_running, of_outcome = Run.outcome.is_null(), Run.outcome == wanted.outcome
    given = [
        (wanted.worker, Run.worker == wanted.worker),
        (wanted.outcome, is_running if wanted.outcome == RUNNING else of_outcome),
        (wanted.trigger, Run.trigger == wanted.trigger),
        (wanted.since, Run.started_at >= wanted.since),
        (wanted.until, Run.started_at < wanted.until),
        (before, before and _after(before)),
    ]
    return [*map(record_of, newest(select_runs(), [Run.started_at, Run.id], limit, *given))]


def _after(position: RunPosition) -> Expression:
    """Return the condition that a run of the current database comes after the position."""
    after: Expression
    if database.selected == position.database:
        after = Tuple(Run.started_at, Run.id) < Tuple(position.started_at, position.run_id)
    elif database.selected < position.database:
        after = Run.started_at <= position.started_at
    else:
        after = Run.started_at < position.started_at
    return after
