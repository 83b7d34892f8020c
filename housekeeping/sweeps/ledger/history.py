"""Past runs in the ledger, for a worker's last runs and the explanation of one. `run_list` has the pages of all."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from datetime import datetime
from typing import Any, Final

from housekeeping.core.settings import MAIN
from housekeeping.database.connection import database
from housekeeping.sweeps.ledger.models import NOW, Run
from housekeeping.sweeps.ledger.runs import PREDICATE, SILENCE

#: A database's name begins with a letter, so 03:00 is a time and no label.
_LABEL: Final = re.compile(r"(?:([A-Za-z][A-Za-z0-9_-]*):)?([0-9]{1,30})")
_ATTEMPTS: Final = 100  # of one message; its retries are 25
#: Columns that only the page of one run shows. They may be long.
_LONG: Final = ("traceback", "rejected")
_NEVER_BEGAN: Final = ("skipped", "missed")


def run_label(run_id: int, name: str) -> str:
    """Return a run's label: ``4711`` in the main database, ``ci:4711`` in the database ``ci``."""
    return str(run_id) if name == MAIN else f"{name}:{run_id}"


def parse_run_label(text: str) -> tuple[str, int] | None:
    """Return the database's name and the run id in a `run_label`; None for another text."""
    found = _LABEL.fullmatch(text)
    return None if found is None else (found[1] or MAIN, int(found[2]))


def name_database(values: dict[str, Any], name: str) -> dict[str, Any]:
    """Return the values with the name of their database, if there are several databases."""
    return {**values, "database": name} if database.several() else values


@dataclass(frozen=True, slots=True)
class RunRecord:
    """One row of the ledger.

    Attributes:
      outcome: None while the run is open, or after its process died.
      silent_s: Seconds since the last heartbeat of an open run.
      lost: Whether the run is open and has missed three heartbeats.
      backlog: Stale rows at its end, counted up to a limit; None if not counted.
      host, pid: The process that runs it, or that recorded a skipped or missed tick; None in rows of earlier releases.
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
    database: str = MAIN

    @property
    def label(self) -> str:
        """The run's label, see `run_label`."""
        return run_label(self.run_id, self.database)

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
        times = {name: value.isoformat() for name, value in values.items() if isinstance(value, datetime)}
        duration_s = None if self.duration_s is None else round(self.duration_s, 3)
        silent_s = None if self.silent_s is None else round(self.silent_s, 3)
        return name_database(
            {**values, **times, "duration_s": duration_s, "heartbeat_age_s": silent_s, "maybe_lost": self.lost},
            self.database,
        )


def recent(worker: str, limit: int) -> list[RunRecord]:
    """Return the worker's last runs, newest first."""
    rows = select_runs().where(Run.worker == worker).order_by(Run.id.desc()).limit(limit)
    return [record_of(run) for run in rows]


def find(run_id: int) -> RunRecord | None:
    """Return the run with this id; None if there is none."""
    run = select_runs().where(Run.id == run_id).first()
    return None if run is None else record_of(run)


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
      traceback: Traceback of the error that ended it; None without an error, or if the release did not record it.
      rejected: The rejected records by cause; empty while the run is open, and of earlier releases.
    """

    traceback: str | None
    rejected: Sequence[RejectedRecords]

    def as_json(self) -> dict[str, Any]:
        """Return the fields of ``housekeeping runs ID --json``."""
        return asdict(self)


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
    rows = select_runs().where(Run.message_id == message_id).order_by(Run.id).limit(_ATTEMPTS)
    return [record_of(run) for run in rows]


def at_tick(worker: str, tick: datetime) -> list[RunRecord]:
    """Return all attempts at a tick of the worker, oldest first."""
    rows = select_runs().where((Run.worker == worker) & (Run.tick == tick)).order_by(Run.id).limit(_ATTEMPTS)
    return [record_of(run) for run in rows]


def took_over_from(record: RunRecord) -> list[int]:
    """Return the ids of the lost runs that this run took over from when it began."""
    if record.outcome in _NEVER_BEGAN:
        return []
    earlier = (Run.worker == record.worker) & (Run.id < record.run_id)
    before = Run.select(Run.started_at).where(earlier & _began()).order_by(Run.id.desc()).limit(1).scalar()
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
    found: int | None = Run.select(Run.id).where(later & _began()).order_by(Run.id).limit(1).scalar()
    return found


def _began() -> Any:
    return Run.outcome.is_null() | Run.outcome.not_in(_NEVER_BEGAN)


def select_runs() -> Any:
    """Return the query that `record_of` reads."""
    columns = (each for each in Run._meta.sorted_fields if each.name not in _LONG)
    return Run.select(*columns, NOW.alias("read_at"), (Run.heartbeat_at < NOW - SILENCE).alias("silent")).dicts()


def record_of(row: dict[str, Any]) -> RunRecord:
    """Return one row of the query `select_runs`."""
    run_id, read_at, silent = (row.pop(name) for name in ("id", "read_at", "silent"))
    row["counts"] = {name: value for name, value in row["counts"].items() if name != PREDICATE}
    ended = row["outcome"] is not None
    silent_s = None if ended else (read_at - row["heartbeat_at"]).total_seconds()
    return RunRecord(run_id, **row, silent_s=silent_s, lost=not ended and silent, database=database.selected)
