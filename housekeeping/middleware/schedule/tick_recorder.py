"""What became of each tick, in the run ledger; sweeps write their own runs, this writes the rest."""

from __future__ import annotations

import json
from collections import deque
from contextlib import suppress
from datetime import datetime, timedelta
from typing import Any, Final

import redis
from dramatiq import Actor, Message, MessageProxy
from peewee import DataError, IntegrityError, PeeweeException, fn

from housekeeping.core.cron import Cron
from housekeeping.core.sanitize import error_line, typed_error_line
from housekeeping.core.telemetry import metrics
from housekeeping.core.telemetry.logs import logger as named_logger
from housekeeping.database.connection import database
from housekeeping.middleware.schedule.tick_store import Note, TickStore, moment
from housekeeping.sweeps.ledger import runs
from housekeeping.sweeps.ledger.models import Run
from housekeeping.sweeps.ledger.runs import Outcome

logger = named_logger(__name__)

_KEPT: Final = 1000  # rows kept in memory while database and Redis are away; the oldest are given up first
_COUNTED: Final = 600_000  # missed ticks are counted up to here, a year of minutes and more: a second's work
_MINUTE: Final = timedelta(minutes=1)
_UNLESS_ANY: Final = "unless_any"  # in a note: the row is not to be written when its message has one
#: What is wrong with this one note; any other error is the database's, and all notes wait.
_UNWRITABLE: Final = (DataError, IntegrityError, ValueError, TypeError, KeyError, AttributeError)


def tick_of(message: Message[Any] | MessageProxy) -> datetime | None:
    """The nominal time the message stands for; null when no schedule sent it."""
    tick = message.options.get("tick")
    try:
        return datetime.fromisoformat(tick) if isinstance(tick, str) else None
    except ValueError:
        return None


def writes_its_own(actor: Actor[..., Any]) -> bool:
    """Whether the actor is a sweep, whose engine gives each run a row."""
    return "sweep" in actor.options


class TickRecorder:
    """Writes rows for ticks that have no run of a sweep; nothing without a database.

    A row that cannot be written, because the database is away, is noted in Redis and written by the next scheduler
    that wakes up. While Redis is away as well it is kept in memory, until the end of the process's next message.
    """

    def __init__(self, memory: TickStore) -> None:
        self._memory = memory
        self._unwritten: deque[dict[str, Any]] = deque(maxlen=_KEPT)

    @property
    def has_ledger(self) -> bool:
        """Whether there is a database to write to."""
        return database.obj is not None

    def record(self, worker: str, outcome: Outcome, reason: str | None, tick: datetime, message_id: str | None) -> None:
        """Write one row and a log line."""
        said(worker, outcome, reason, tick)
        if not self.has_ledger:
            return
        row = row_of(outcome, reason, message_id)
        try:
            runs.record(worker, **row, tick=tick, trigger="schedule")
        except PeeweeException as error:
            self._keep(worker, tick, row, error)

    def make_sure(self, worker: str, reason: str, tick: datetime, message_id: str) -> None:
        """Write that a sweep failed, unless it has a row for this message: then that one says what became of it."""
        if not self.has_ledger:
            return
        row = row_of("failed", reason, message_id)
        try:
            _write_once(worker, tick, row, unless_any=True)
        except PeeweeException as error:
            self._keep(worker, tick, {**row, _UNLESS_ANY: True}, error)

    def hand_on(self) -> None:
        """Note what is kept in memory, for a scheduler to write, if Redis is back; costs nothing where nothing is."""
        with suppress(redis.RedisError):
            self._hand_on()

    def _hand_on(self) -> None:
        while self._unwritten:
            try:
                kept = self._unwritten.popleft()  # at once: other threads do so beside this one
            except IndexError:
                return
            try:
                self._memory.note(**kept)
            except redis.RedisError:
                self._unwritten.appendleft(kept)
                raise

    def flush(self, schedules: dict[str, Cron]) -> None:
        """Write what is noted, and what could not be noted.

        Raises:
          redis.RedisError: Redis did not answer; nothing is lost.
        """
        self._hand_on()
        for note in self._memory.notes():
            try:
                self._write(note, schedules)
            except _UNWRITABLE as error:
                # It costs itself only, and stays: a newer release may know what it says.
                logger.error(
                    "Outcome of a tick cannot be recorded",
                    worker=note.worker,
                    note=note.field,
                    error=typed_error_line(error),
                )
            except PeeweeException as error:
                logger.error("Outcome of a tick could not be recorded yet", worker=note.worker, error=error_line(error))
                return

    def _write(self, note: Note, schedules: dict[str, Cron]) -> None:
        if not self.has_ledger:
            self._memory.strike(note)
        elif note.kind == "fired":
            # Struck out first: done twice it would hide a tick that was missed.
            if self._memory.strike(note):
                try:
                    _no_longer_missed(note.worker, note.tick)
                except PeeweeException:
                    self._memory.put_back(note)
                    raise
        elif note.kind == "row":
            row = json.loads(note.value)
            _write_once(note.worker, note.tick, row, unless_any=row.pop(_UNLESS_ANY, False))
            self._memory.strike(note)
        elif note.worker in schedules:  # else it is the business of another release, which has this actor
            _write_missed(note.worker, schedules[note.worker], moment(note.value), note.tick)
            self._memory.strike(note)

    def _keep(self, worker: str, tick: datetime, row: dict[str, Any], error: PeeweeException) -> None:
        logger.error("Outcome of a tick could not be recorded yet", worker=worker, error=error_line(error))
        try:
            self._memory.note(worker, tick, row)
        except redis.RedisError:
            self._unwritten.append({"worker": worker, "tick": tick, "row": row})


def said(worker: str, outcome: Outcome, reason: str | None, tick: datetime, **counts: int) -> None:
    """The log line of a tick that has ended."""
    logger.info("Tick ended", worker=worker, tick=tick, outcome=outcome, reason=reason, **counts)


def row_of(outcome: Outcome, reason: str | None, message_id: str | None) -> dict[str, Any]:
    """A row of the ledger, as a note holds it."""
    return {"outcome": outcome, "reason": reason, "message_id": message_id}


def _write_missed(worker: str, cron: Cron, after: datetime, last: datetime) -> None:
    """Record the ticks of a gap, once, whoever else does so at the same time; one transaction."""
    with database.atomic():
        _alone(worker)
        # What the ledger has is accounted for: a scheduler that died after it wrote of this gap, or of part of it.
        known = _last_recorded(worker, last + _MINUTE)
        missed = cron.count(max(after, known or after), last, _COUNTED)
        if not missed:
            return
        runs.record(
            worker,
            "missed",
            "no_scheduler",
            message_id=None,
            tick=last,
            trigger="schedule",
            counts={"missed": missed},
        )
    said(worker, "missed", "no_scheduler", last, missed=missed)
    metrics.TICKS_MISSED.add(worker, number=missed)


def _no_longer_missed(worker: str, tick: datetime) -> None:
    """Take a tick out of the gap it was counted in; one transaction."""
    with database.atomic():
        _alone(worker)
        gap: Any = (
            Run.select(Run.id, Run.counts)
            .where((Run.worker == worker) & (Run.outcome == "missed") & (Run.tick >= tick))
            .order_by(Run.tick)
            .limit(1)
            .tuples()
            .first()
        )
        if gap is None:
            return
        number, counts = gap
        left = counts.get("missed", 0) - 1
        if left > 0:
            Run.update(counts={**counts, "missed": left}).where(Run.id == number).execute()
        else:
            Run.delete().where(Run.id == number).execute()


def _write_once(worker: str, tick: datetime, row: dict[str, Any], *, unless_any: bool) -> None:
    """Record an outcome unless that has been done, or, if so wanted, any row of its message is there."""
    with database.atomic():
        _alone(worker)
        there = (Run.worker == worker) & (Run.tick == tick) & (Run.message_id == row["message_id"])
        if not unless_any:
            there &= Run.outcome == row["outcome"]
        if not Run.select(Run.id).where(there).exists():
            runs.record(worker, **row, tick=tick, trigger="schedule")


def _alone(worker: str) -> None:
    """Wait until no other transaction writes of this worker's ticks."""
    database.execute_sql("SELECT pg_advisory_xact_lock(hashtextextended(%s, 0))", (f"housekeeping ticks {worker}",))


def last_recorded(actor: Actor[..., Any], before: datetime) -> datetime | None:
    """The actor's last tick before a moment, by the ledger; null when it cannot know.

    Raises:
      peewee.PeeweeException: The database did not answer.
    """
    return None if database.obj is None else _last_recorded(actor.actor_name, before)


def _last_recorded(worker: str, before: datetime) -> datetime | None:
    last: datetime | None = Run.select(fn.MAX(Run.tick)).where((Run.worker == worker) & (Run.tick < before)).scalar()
    return last


def ended_well(message_id: str) -> bool:
    """Whether the ledger has a completed run of this message; False when it cannot be asked."""
    if database.obj is None:
        return False
    try:
        return runs.completed(message_id)
    except PeeweeException as error:
        logger.error("The ledger could not be asked", message_id=message_id, error=error_line(error))
        return False
