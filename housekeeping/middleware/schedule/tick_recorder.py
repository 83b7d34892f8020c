"""Ledger rows for ticks that start no run, such as skipped and missed ticks. Runs of sweeps write their own rows."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import datetime
from typing import Any, Final

import redis
from dramatiq import Actor, Message, MessageProxy
from peewee import DataError, IntegrityError, PeeweeException

from housekeeping.core.cron import Cron
from housekeeping.core.sanitize import error_line, typed_error_line
from housekeeping.core.settings import MAIN
from housekeeping.core.telemetry import metrics
from housekeeping.core.telemetry.logs import logger as named_logger
from housekeeping.database.connection import database
from housekeeping.middleware.schedule import tick_rows
from housekeeping.middleware.schedule.tick_store import Note, TickStore, from_seconds
from housekeeping.sweeps.ledger import run_queries, run_start
from housekeeping.sweeps.ledger.runs import Outcome

logger = named_logger(__name__)

_MAX_UNWRITTEN: Final = (
    1000  # rows kept in memory while neither database nor Redis answers; the oldest are dropped first
)
_UNLESS_ANY: Final = "unless_any"  # in a note: write the row only if the ledger has none of this message
#: Errors that one note causes. Any other error comes from the database and stops the writing of all notes.
_UNWRITABLE: Final = (DataError, IntegrityError, ValueError, TypeError, KeyError, AttributeError)


def tick_of(message: Message[Any] | MessageProxy) -> datetime | None:
    """Return the tick of a message; None if no schedule sent it."""
    tick = message.options.get("tick")
    try:
        return datetime.fromisoformat(tick) if isinstance(tick, str) else None
    except ValueError:
        return None


def records_its_runs(actor: Actor[..., Any]) -> bool:
    """Return whether the actor is a sweep, whose engine writes a row for each run."""
    return "sweep" in actor.options


class TickRecorder:
    """Writer of ledger rows for ticks that start no run. Without a database it writes nothing.

    While PostgreSQL is down, a row is kept as a note in Redis. The next scheduler that wakes up writes it to the
    ledger. While Redis is down too, the row stays in memory until this process finishes its next message.

    Parameters:
      database_of: Returns the name of the database with the ledger of an actor, by the actor's name.
    """

    def __init__(self, store: TickStore, database_of: Callable[[str], str]) -> None:
        self._store = store
        self._database_of = database_of
        self._unwritten: deque[dict[str, Any]] = deque(maxlen=_MAX_UNWRITTEN)

    @property
    def has_ledger(self) -> bool:
        """Return whether there is a database to write to."""
        return database.obj is not None

    def record(self, worker: str, outcome: Outcome, reason: str | None, tick: datetime, message_id: str | None) -> None:
        """Log the outcome of a tick and write its ledger row; keep the row if the database is down."""
        log_tick(worker, outcome, reason, tick)
        if not self.has_ledger:
            return
        row = outcome_row(outcome, reason, message_id)
        try:
            with database.using(self._database_of(worker)):
                run_start.record(worker, **row, tick=tick, trigger="schedule")
        except PeeweeException as error:
            self._keep(worker, tick, row, error)

    def record_failure_once(self, worker: str, reason: str, tick: datetime, message_id: str) -> None:
        """Record that a sweep's message failed, unless the ledger has a row of this message."""
        if not self.has_ledger:
            return
        row = outcome_row("failed", reason, message_id)
        try:
            with database.using(self._database_of(worker)):
                tick_rows.write_once(worker, tick, row, unless_any=True)
        except PeeweeException as error:
            self._keep(worker, tick, {**row, _UNLESS_ANY: True}, error)

    def note_unwritten(self) -> None:
        """Move the rows that wait in memory to Redis, if it answers."""
        with suppress(redis.RedisError):
            self._note_unwritten()

    def _note_unwritten(self) -> None:
        while self._unwritten:
            try:
                row = self._unwritten.popleft()  # no check before: other threads do this at the same time
            except IndexError:
                return
            try:
                self._store.note(**row)
            except redis.RedisError:
                self._unwritten.appendleft(row)
                raise

    def flush(self, schedules: Mapping[str, Cron]) -> None:
        """Write the rows that wait in Redis or in memory to the ledger.

        Raises:
          redis.RedisError: Redis does not answer; the rows are kept.
        """
        self._note_unwritten()
        unavailable: set[str] = set()
        for note in self._store.notes():
            name = self._database_of(note.worker)
            if name in unavailable:
                continue
            try:
                with database.using(name):
                    self._write(note, schedules)
            except _UNWRITABLE as error:
                # The other notes are still written. This one stays, because a newer release may be able to read it.
                logger.error(
                    "Outcome of a tick cannot be recorded",
                    worker=note.worker,
                    note=note.field,
                    error=typed_error_line(error),
                )
            except PeeweeException as error:
                logger.error("Outcome of a tick could not be recorded yet", worker=note.worker, error=error_line(error))
                unavailable.add(name)

    def _write(self, note: Note, schedules: Mapping[str, Cron]) -> None:
        if not self.has_ledger:
            self._store.remove(note)
        elif note.kind == "fired":
            # Removed first: if the ledger subtracted this tick twice, it would hide a missed one.
            if self._store.remove(note):
                try:
                    tick_rows.no_longer_missed(note.worker, note.tick)
                except PeeweeException:
                    self._store.restore(note)
                    raise
        elif note.kind == "row":
            row = json.loads(note.value)
            tick_rows.write_once(note.worker, note.tick, row, unless_any=row.pop(_UNLESS_ANY, False))
            self._store.remove(note)
        elif note.worker in schedules:  # otherwise another release has this actor and writes it
            missed = tick_rows.write_missed(note.worker, schedules[note.worker], from_seconds(note.value), note.tick)
            if missed:
                log_tick(note.worker, "missed", tick_rows.NO_SCHEDULER, note.tick, missed=missed)
                metrics.TICKS_MISSED.add(note.worker, number=missed)
            self._store.remove(note)

    def _keep(self, worker: str, tick: datetime, row: dict[str, Any], error: PeeweeException) -> None:
        logger.error("Outcome of a tick could not be recorded yet", worker=worker, error=error_line(error))
        try:
            self._store.note(worker, tick, row)
        except redis.RedisError:
            self._unwritten.append({"worker": worker, "tick": tick, "row": row})


def log_tick(worker: str, outcome: Outcome, reason: str | None, tick: datetime, **counts: int) -> None:
    """Write the log line of a tick that has ended."""
    logger.info("Tick ended", worker=worker, tick=tick, outcome=outcome, reason=reason, **counts)


def outcome_row(outcome: Outcome, reason: str | None, message_id: str | None) -> dict[str, Any]:
    """Return the fields of a ledger row, in the form that a note stores."""
    return {"outcome": outcome, "reason": reason, "message_id": message_id}


def database_of(actor: Actor[..., Any] | None) -> str:
    """Return the name of the database with the actor's ledger: a sweep's own, otherwise `MAIN`."""
    sweep = None if actor is None else actor.options.get("sweep")
    return MAIN if sweep is None else str(sweep.database)


def last_recorded(actor: Actor[..., Any], before: datetime) -> datetime | None:
    """Return the actor's last tick in the ledger before a time; None without one, or without a database.

    Raises:
      peewee.PeeweeException: When the database does not answer.
    """
    with database.using(database_of(actor)):
        return None if database.obj is None else tick_rows.last_tick(actor.actor_name, before)


def is_completed(message_id: str) -> bool:
    """Return whether the current ledger has a completed run of this message; False when it cannot be read."""
    if database.obj is None:
        return False
    try:
        return run_queries.completed(message_id)
    except PeeweeException as error:
        logger.error("Ledger could not be read", message_id=message_id, error=error_line(error))
        return False
