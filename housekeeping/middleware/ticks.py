"""Store of ticks: claimed and recorded ticks in Redis, and their rows in the ledger.

Whether a tick is sent is decided in `schedule`. A recorded tick was missed, or belongs to the one message that may run.
Lua scripts claim and record it. Ticks that start no run, such as skipped and missed ones, have rows in the ledger; rows
that cannot be written are kept. Runs of sweeps write their own rows.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Final, Literal
from uuid import uuid4

import redis
from dramatiq import Actor, Message, MessageProxy
from peewee import DataError, IntegrityError, PeeweeException

from housekeeping.core import telemetry
from housekeeping.core.cron import Cron
from housekeeping.core.logs import error_line, typed_error_line
from housekeeping.core.logs import logger as named_logger
from housekeeping.core.redis import GIVEN, fill, milliseconds, named, read_scripts, text
from housekeeping.core.settings import MAIN
from housekeeping.database.connection import database
from housekeeping.ledger import runs
from housekeeping.ledger.runs import Outcome

#: The scripts of the file beside this module, by name.
_LUA: Final = read_scripts(__file__)

CLAIM: Final = _LUA["claim"]

RECORD: Final = fill(_LUA["record"], parts=_LUA["parts"])


#: Ticks remembered per actor: a day of minutes and an hour, for clocks that step.
_REMEMBERED: Final = 1500
#: How long an actor's ticks are remembered. Longer than the longest common period, a year, so that a missed tick is
#: recognized.
_FORGOTTEN_AFTER: Final = timedelta(days=400)
#: A claim expires when its message was neither confirmed nor started. Longer than an enqueue takes, shorter than a
#: minute, so that the next wake-up sends what a killed scheduler left.
CLAIMED_FOR: Final = timedelta(seconds=10)
#: The token that records a tick as sent by any of its messages.
ANY_TOKEN: Final = "*"
_MAX_NOTES: Final = 10_000  # kept for the ledger while the database does not answer; at most one per tick

#: How a tick is recorded. ``sent``: its message is in the queue, or was dropped on the way. ``begun``: a worker starts
#: it before the scheduler has recorded it. ``retried``: a worker starts a retry of it. ``missed``: it will not be sent.
Settling = Literal["sent", "begun", "retried", "missed"]


@dataclass(frozen=True, slots=True)
class TickState:
    """State of a tick.

    Attributes:
      recorded: Whether it was sent or missed.
      being_sent: Whether another process has claimed it.
      actor_known: Whether any tick of its actor is stored.
    """

    recorded: bool
    being_sent: bool
    actor_known: bool


@dataclass(frozen=True, slots=True)
class Note:
    """Pending entry for the run ledger, kept in Redis until it is written there.

    Attributes:
      kind: ``gap``: ticks up to this one were missed. ``fired``: a tick that was counted as missed has run. ``row``: a
        row to write.
      value: For a gap, the last recorded tick before it, and a colon and the time since when the scheduler that ended
        the gap could not send ticks, if there is such a time. For a row, the row as JSON.
      field: Field of the Redis hash that contains the note.
    """

    kind: str
    tick: datetime
    worker: str
    value: str
    field: str


class TickStore:
    """Store of the sent and missed ticks of every actor.

    A tick is claimed for some seconds while its message is enqueued. It is recorded when the message is in the queue or
    starts to run, whichever is first. If an answer of Redis was lost, the message may be enqueued twice, each copy with
    its own token. Only the copy whose token recorded the tick runs.
    """

    def __init__(self, client: redis.Redis, namespace: str) -> None:
        self._client = client
        self._prefix = f"{namespace}:ticks:"
        self._claims = f"{namespace}:tick_claim:"
        self._notes = f"{namespace}:tick_notes"
        self._claim: Any = client.register_script(GIVEN + CLAIM)
        self._record: Any = client.register_script(GIVEN + RECORD)
        #: The last token that this process claimed for each actor. It may send again at once what it failed to send.
        self._own: dict[str, str] = {}

    def state_of(self, actor: str, tick: datetime) -> TickState:
        """Return the state of a tick, in one round trip."""
        with self._client.pipeline(transaction=False) as pipeline:
            pipeline.zcount(self._prefix + actor, _seconds(tick), _seconds(tick))
            pipeline.get(self._claims + actor)
            pipeline.zcard(self._prefix + actor)
            recorded, held, known = pipeline.execute()
        of_tick, _, token = text(held or "").partition(":")
        being_sent = of_tick == str(_seconds(tick)) and token != self._own.get(actor)
        return TickState(bool(recorded), being_sent, bool(known))

    def was_sent(self, actor: str, tick: datetime) -> bool | None:
        """Return whether the tick's message was sent; None if it is being sent, or Redis no longer knows."""
        key, seconds = self._prefix + actor, _seconds(tick)
        with self._client.pipeline(transaction=False) as pipeline:
            pipeline.zrangebyscore(key, seconds, seconds)
            pipeline.zrange(key, 0, 0, withscores=True)
            pipeline.get(self._claims + actor)
            pipeline.hexists(self._notes, f"gap:{seconds}:{actor}")
            recorded, first, held, is_missed = pipeline.execute()
        if recorded:
            # Without a token, the memory of a new actor begins there. A missed tick has a note until the ledger has it.
            return bool(text(recorded[0]).split(":")[1]) and not is_missed
        is_claimed = text(held or "").partition(":")[0] == str(seconds)
        return False if first and first[0][1] < seconds and not is_claimed else None

    def remember(self, actor: str, tick: datetime) -> None:
        """Record the first tick of a new actor as missed."""
        self.record(actor, tick, "", "missed", last_missed=tick, noting=False)

    def claim(self, actor: str, tick: datetime, token: str, previous: datetime) -> bool:
        """Claim the tick for some seconds; return False if it is recorded or another process has claimed it."""
        own, self._own[actor] = self._own.get(actor), token
        given = named(
            tick=str(_seconds(tick)),
            token=token,
            own_token=own,
            previous=str(_seconds(previous)),
            most=_REMEMBERED,
            ttl=milliseconds(_FORGOTTEN_AFTER),
            claim_ttl=milliseconds(CLAIMED_FOR),
        )
        return bool(self._claim(keys=[self._prefix + actor, self._claims + actor], args=[given]))

    def record(
        self,
        actor: str,
        tick: datetime,
        token: str,
        how: Settling,
        *,
        last_missed: datetime,
        noting: bool,
        row: dict[str, Any] | None = None,
    ) -> tuple[bool, bool]:
        """Record the tick for this token; return whether the token has it, and whether a note was written.

        A repeated call with the same token changes nothing.

        Parameters:
          last_missed: The last missed tick if there is a gap before this one.
          noting: Whether to write notes of a gap and of the row.
        """
        given = named(
            tick=str(_seconds(tick)),
            token=token,
            how=how,
            last_missed=str(_seconds(last_missed)),
            most=_REMEMBERED,
            ttl=milliseconds(_FORGOTTEN_AFTER),
            actor=actor if noting else None,
            row=json.dumps(row) if row else None,
            most_notes=_MAX_NOTES,
        )
        ours, noted = self._record(keys=[self._prefix + actor, self._claims + actor, self._notes], args=[given])
        return bool(ours), bool(noted)

    def notes(self) -> list[Note]:
        """Return the notes, gaps first; skip fields in an unknown format."""
        found: Any = self._client.hgetall(self._notes)
        notes = []
        for field, value in found.items():
            with suppress(ValueError, OverflowError):
                kind, seconds, worker = text(field).split(":", 2)
                notes.append(Note(kind.partition(".")[0], from_seconds(seconds), worker, text(value), text(field)))
        return sorted(notes, key=lambda note: (note.kind != "gap", note.tick))

    def note(self, worker: str, tick: datetime, row: dict[str, Any]) -> None:
        """Write a note with a ledger row."""
        number: Any = self._client.hlen(self._notes)
        if number < _MAX_NOTES:
            self._write(f"row.{uuid4().hex}:{_seconds(tick)}:{worker}", json.dumps(row))

    def remove(self, note: Note) -> bool:
        """Remove a note; return whether it existed."""
        return bool(self._client.hdel(self._notes, note.field))

    def restore(self, note: Note) -> None:
        """Write a removed note again."""
        self._write(note.field, note.value)

    def _write(self, field: str, value: str) -> None:
        with self._client.pipeline() as pipeline:
            pipeline.hset(self._notes, field, value)
            pipeline.pexpire(self._notes, milliseconds(_FORGOTTEN_AFTER))
            pipeline.execute()


def new_token(unsent_since: datetime | None = None) -> str:
    """Return a unique token of a tick.

    Parameters:
      unsent_since: Since when the process could not send ticks. The note of a gap gets it from the token, because any
        process may be the first to record the tick.
    """
    return uuid4().hex if unsent_since is None else f"{uuid4().hex}-{_seconds(unsent_since)}"


def from_seconds(seconds: str | int) -> datetime:
    """Return the time that is this many seconds after 1970."""
    return datetime.fromtimestamp(int(seconds), UTC)


def _seconds(at: datetime) -> int:
    return int(at.timestamp())


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
    """

    def __init__(self, store: TickStore) -> None:
        self._store = store
        #: By sweep: the name of its database with its ledger.
        self.databases: dict[str, str] = {}
        self._unwritten: deque[dict[str, Any]] = deque(maxlen=_MAX_UNWRITTEN)

    @property
    def has_ledger(self) -> bool:
        """Return whether there is a database to write to."""
        return database.obj is not None

    def record(
        self,
        worker: str,
        outcome: Outcome,
        reason: str | None,
        tick: datetime,
        message_id: str | None,
        *,
        unless_any: bool = False,
    ) -> None:
        """Log the outcome of a tick and write its ledger row; keep the row if the database is down.

        Parameters:
          unless_any: Whether the message of a sweep failed. Its engine logs each run and writes a row; only a message
            without any row gets one here.
        """
        if not unless_any:
            log_tick(worker, outcome, reason, tick)
        if not self.has_ledger:
            return
        row = outcome_row(outcome, reason, message_id)
        try:
            with database.using(self._database_of(worker)):
                if unless_any:
                    runs.record_tick(worker, tick, row, unless_any=True)
                else:
                    runs.record(worker, **row, tick=tick, trigger="schedule")
        except PeeweeException as error:
            logger.error("Outcome of a tick could not be recorded yet", worker=worker, error=error_line(error))
            if unless_any:
                row[_UNLESS_ANY] = True
            try:
                self._store.note(worker, tick, row)
            except redis.RedisError:
                self._unwritten.append({"worker": worker, "tick": tick, "row": row})

    def last_recorded(self, worker: str, before: datetime) -> datetime | None:
        """Return the actor's last tick in the ledger before a time; None without one, or without a database.

        Raises:
          peewee.PeeweeException: When the database does not answer.
        """
        with database.using(self._database_of(worker)):
            return None if database.obj is None else runs.last_tick(worker, before)

    def is_completed(self, worker: str, message_id: str) -> bool:
        """Return whether the ledger has a completed run of this message; False when it cannot be read."""
        try:
            with database.using(self._database_of(worker)):
                return database.obj is not None and runs.completed(message_id)
        except PeeweeException as error:
            logger.error("Ledger could not be read", message_id=message_id, error=error_line(error))
            return False

    def _database_of(self, worker: str) -> str:
        # Another release may have actors that are unknown here.
        return self.databases.get(worker, MAIN)

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
                    runs.no_longer_missed(note.worker, note.tick)
                except PeeweeException:
                    self._store.restore(note)
                    raise
        elif note.kind == "row":
            row = json.loads(note.value)
            runs.record_tick(note.worker, note.tick, row, unless_any=row.pop(_UNLESS_ANY, False))
            self._store.remove(note)
        elif note.worker in schedules:  # otherwise another release has this actor and writes it
            cron = schedules[note.worker]
            after, _, unsent_since = note.value.partition(":")
            # The cause of the gap's beginning: later ticks may have been missed for another one.
            unsent = bool(unsent_since) and cron.next(from_seconds(after)) >= from_seconds(unsent_since)
            reason = runs.NOT_SENT if unsent else runs.NO_SCHEDULER
            missed = runs.record_missed(note.worker, cron, from_seconds(after), note.tick, reason)
            if missed:
                log_tick(note.worker, "missed", reason, note.tick, missed=missed)
                telemetry.TICKS_MISSED.add(note.worker, number=missed)
            self._store.remove(note)


def log_tick(worker: str, outcome: Outcome, reason: str | None, tick: datetime, **counts: int) -> None:
    """Write the log line of a tick that has ended."""
    logger.info("Tick ended", worker=worker, tick=tick, outcome=outcome, reason=reason, **counts)


def outcome_row(outcome: Outcome, reason: str | None, message_id: str | None) -> dict[str, Any]:
    """Return the fields of a ledger row, in the form that a note stores."""
    return {"outcome": outcome, "reason": reason, "message_id": message_id}
