"""Schedules: actors that run at ticks, each tick with at most one message and exactly one outcome.

Once a minute, when called by periodiq, `Schedule.is_due` decides whether to send an actor's latest tick. `TickStore`
claims it, and records in Redis that it was missed, or which message may run. `TickRecorder` writes the ledger rows of
ticks that start no run, such as skipped and missed ones, and keeps rows that cannot be written yet. Runs of sweeps
write their own rows.
"""

from __future__ import annotations

import json
import sys
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta, tzinfo
from functools import partial
from typing import Any, Final, Literal
from uuid import NAMESPACE_URL, uuid4, uuid5

import redis
from dramatiq import Actor, Broker, Message, MessageProxy, Middleware
from dramatiq.middleware import Shutdown
from peewee import DataError, IntegrityError, PeeweeException

from housekeeping.brokers.dramatiq_internals import (
    InvalidOption,
    Requeue,
    SkipDelivery,
    SkipEnqueue,
    fail_message_on_error,
)
from housekeeping.core import telemetry
from housekeeping.core.cron import Cron
from housekeeping.core.errors import DeclarationError, HousekeepingError, LeaseLost
from housekeeping.core.interrupts import LostLease
from housekeeping.core.logs import error_line, typed_error_line
from housekeeping.core.logs import logger as named_logger
from housekeeping.core.pings import INSTALLATION, pings
from housekeeping.core.redis import GIVEN, fill, milliseconds, named, read_scripts, text
from housekeeping.core.settings import MAIN
from housekeeping.database.connection import database
from housekeeping.ledger import runs
from housekeeping.ledger.runs import MINUTE, Outcome
from housekeeping.middleware.keys import RETRY_WAITS, schedule_of, signature_of, tick_of
from housekeeping.middleware.observe import SchedulerHeartbeats

logger = named_logger(__name__)

#: The scripts of the file beside this module, by name.
_LUA: Final = read_scripts(__file__)
CLAIM: Final = _LUA["claim"]
RECORD: Final = fill(_LUA["record"], parts=_LUA["parts"])

_ALREADY_SENT: Final = "tick_already_sent"  # the skip reason of a message whose tick has its outcome


class Schedule(Middleware):
    """Middleware for actors that run on a schedule.

    An actor opts in with a cron expression::

        @dramatiq.actor(schedule="*/6 * * * *")
        def sweep() -> None: ...

    The command ``periodiq module`` sends the messages; any number of these schedulers may run. A scheduler claims a
    tick in Redis for some seconds, enqueues its message, and then records the tick as sent. If it dies in between, the
    next wake-up sends the tick. If the message was enqueued twice, one copy runs. Ticks are missed while no scheduler
    runs or Redis is down. The latest missed tick is then sent. The others are recorded as missed.

    Parameters:
      client: Client of the Redis in which ticks are claimed.
      zone: The time zone of the schedules.
      catch_up: ``latest`` sends the latest missed tick, ``none`` sends no missed tick.
    """

    def __init__(
        self,
        client: redis.Redis,
        namespace: str,
        zone: tzinfo = UTC,
        catch_up: Literal["latest", "none"] = "latest",
        watch: Callable[[], None] | None = None,
    ) -> None:
        self._namespace = namespace
        self._zone = zone
        self._store = TickStore(client, namespace)
        self._recorder = TickRecorder(self._store)
        self._heartbeats = SchedulerHeartbeats(client, namespace, watch=watch)
        self._schedules: dict[str, Cron] = {}
        self._catch_up = catch_up
        self._unavailable_at: datetime | None = None
        #: Whether all was checked and sent since the last wake-up ended; None if nothing was asked.
        self._went_well: bool | None = None
        self._flushed_at: datetime | None = None
        #: By actor: the last tick that was over when Redis last knew the actor, or when this process first asked.
        self._began_after: dict[str, datetime] = {}
        #: By actor: the minute since which this process could not send what was due.
        self._unsent_since: dict[str, datetime] = {}
        self._setup = SetupCheck()
        #: By database: when it last did not answer a check of the setup.
        self._setup_unknown_at: dict[str, datetime] = {}

    @property
    def actor_options(self) -> set[str]:
        return {"schedule", "periodic"}

    def before_declare_actor(self, broker: Broker, actor: Actor[..., Any]) -> None:
        if (sweep := actor.options.get("sweep")) is not None:
            self._recorder.databases[actor.actor_name] = str(sweep.database)
        # Also replaces an application's `periodic=periodiq.cron(...)`: periodiq's CronSpec never fires on some days.
        spec = actor.options.get("schedule") or actor.options.get("periodic")
        if spec is None:
            return
        try:
            # Always a copy: two actors that share one object would share its state.
            cron = Cron(spec.spec, spec.zone) if isinstance(spec, Cron) else Cron(str(spec), self._zone)
            signature_of(actor).bind()
        except DeclarationError as error:
            raise InvalidOption(f"{actor.actor_name}: {error}") from None
        except TypeError as error:
            raise InvalidOption(f"{actor.actor_name}: a schedule sends no arguments: {error}") from None
        cron.due, cron.over = partial(self.is_due, actor), self.over
        actor.options["periodic"] = self._schedules[actor.actor_name] = cron
        telemetry.TICKS_SENT.add(actor.actor_name, number=0)
        telemetry.TICKS_MISSED.add(actor.actor_name, number=0)

    def before_process_message(self, broker: Broker, message: MessageProxy) -> None:
        """Skip a message whose tick another message has, or whose tick was recorded as missed."""
        tick, token = tick_of(message), message.options.get("claim")
        cron = self._schedules.get(message.actor_name)
        if tick is None or not isinstance(token, str) or cron is None:
            return
        how: Literal["begun", "retried"] = "retried" if "retries" in message.options else "begun"
        with fail_message_on_error():
            ours, _ = self._store.record(
                message.actor_name,
                tick,
                token,
                how,
                last_missed=cron.latest(tick - MINUTE),
                noting=database.obj is not None,
            )
        if not ours:
            raise SkipDelivery(_ALREADY_SENT)

    def after_process_message(
        self, broker: Broker, message: MessageProxy, *, result: Any = None, exception: BaseException | None = None
    ) -> None:
        with suppress(redis.RedisError):
            self._recorder.note_unwritten()
        tick = tick_of(message)
        if tick is None or isinstance(exception, Requeue | Shutdown):
            return
        name, message_id = message.actor_name, message.message_id
        if "sweep" in broker.get_actor(name).options:  # its engine writes a row for each run
            if exception is not None:
                self._recorder.record(name, "failed", error_line(exception), tick, message_id, unless_any=True)
        elif exception is None:
            self._recorder.record(name, "done", None, tick, message_id)
        elif isinstance(exception, LostLease | LeaseLost):
            self._recorder.record(name, "lost_lease", "lease_lost", tick, message_id)
        else:
            self._recorder.record(name, "failed", error_line(exception), tick, message_id)

    def after_skip_message(self, broker: Broker, message: MessageProxy) -> None:
        with suppress(redis.RedisError):
            self._recorder.note_unwritten()
        # Dramatiq calls this hook while it handles the SkipMessage, and does not pass it on.
        skip = sys.exception()
        self.tick_skipped(message, "skipped" if skip is None else error_line(skip))

    def is_due(self, actor: Actor[..., Any], now: datetime) -> bool:
        """Return whether to send the actor's latest tick; called by periodiq once a minute. Never raises."""
        self._heartbeats.wake()
        if self._went_well is None:
            self._went_well = True
        name, cron = actor.actor_name, self._schedules[actor.actor_name]
        if not self._is_set_up(actor, now):
            # Its schedule begins once it is set up. No tick before that counts as missed.
            self._began_after[name] = cron.latest(now)
            self._unsent_since.pop(name, None)
            return False
        self._began_after.setdefault(name, cron.latest(now - MINUTE))
        # Until it is sent, or proves not to be due.
        self._unsent_since.setdefault(name, now.replace(second=0, microsecond=0))
        if self._unavailable_at == now:
            return False  # waiting for Redis once per actor would take more than a minute
        try:
            with fail_message_on_error():
                if self._flushed_at != now:
                    self._recorder.flush(self._schedules)
                    self._flushed_at = now
                due = self._is_due(name, cron, now)
        except Exception as error:
            self._unavailable_at, self._went_well = now, False
            logger.error("Ticks could not be checked; retrying in a minute", worker=name, error=error_line(error))
            return False
        if not due:
            self._unsent_since.pop(name, None)
        return due

    def _is_due(self, name: str, cron: Cron, now: datetime) -> bool:
        tick = cron.latest(now)
        in_its_minute = now - tick < MINUTE
        state = self._store.state_of(name, tick)
        if state.actor_known:
            self._began_after[name] = cron.latest(now - MINUTE)
        if state.recorded or state.being_sent:
            return False
        known = state.actor_known
        if not known:
            try:
                # A new actor, or Redis has lost its data: then the ledger has the last tick.
                last = self._recorder.last_recorded(name, tick + MINUTE)
            except PeeweeException as error:
                logger.error("Ledger could not be read", worker=name, error=error_line(error))
                return in_its_minute
            if last is None and self._began_after[name] < cron.latest(now - MINUTE):
                last = self._began_after[name]  # Redis has not answered since the first tick
            if last is not None:
                self._store.remember(name, last)
                known = True
            if last == tick:
                return False
        if in_its_minute or (known and self._catch_up == "latest"):
            return True
        if not known:
            # A new actor's memory begins with this tick.
            self._store.remember(name, tick)
            return False
        # Missed, so that its message does not run if it is in the queue after all.
        token, noting = new_token(self._unsent_since.get(name)), database.obj is not None
        if self._store.record(name, tick, token, "missed", last_missed=tick, noting=noting)[1]:
            self._recorder.flush(self._schedules)
        return False

    def _is_set_up(self, actor: Actor[..., Any], now: datetime) -> bool:
        """Return whether to send the actor's ticks; never raises. Actors that are no sweeps are always set up.

        While the database does not answer, an actor keeps its last result, or counts as set up: its message is sent,
        and the run checks again. Each change is logged once.
        """
        sweep, name = actor.options.get("sweep"), actor.actor_name
        # Waiting for the database once per actor would take more than a minute.
        if sweep is None or self._setup_unknown_at.get(sweep.database) == now:
            return name not in self._setup.problems
        try:
            return self._setup(sweep)
        except (PeeweeException, HousekeepingError) as error:
            self._setup_unknown_at[sweep.database] = now
            logger.warning("Setup could not be checked", worker=name, error=error_line(error))
            return name not in self._setup.problems

    def claim(self, broker: Broker, message: Message[Any]) -> Message[Any]:
        """Claim the tick of a message from periodiq and return the message with its tick; return others unchanged.

        The message id is derived from the tick. If Redis loses its data within the minute and the tick is sent again,
        an idempotent actor still executes it once.

        Raises:
          SkipEnqueue: The tick was sent before, or is being sent.
          StoreUnavailable: Redis does not answer. It may have made the claim, which then expires.
        """
        cron, name = schedule_of(broker, message), message.actor_name
        if cron is None:
            return message
        tick = cron.latest(datetime.fromisoformat(message.options["scheduled_at"]))
        token = new_token(self._unsent_since.get(name))
        with fail_message_on_error():
            free = self._store.claim(name, tick, token, cron.latest(tick - MINUTE))
        if not free:
            self._unsent_since.pop(name, None)
            raise SkipEnqueue(_ALREADY_SENT)
        # Without `scheduled_at`: periodiq's own middleware would drop late messages and retries because of it.
        options = {name: value for name, value in message.options.items() if name != "scheduled_at"}
        about = f"{self._namespace}:ticks:{name}:{int(tick.timestamp())}"
        return replace(
            message,
            message_id=str(uuid5(NAMESPACE_URL, about)),
            options={**options, "tick": tick.isoformat(), "claim": token},
        )

    def sent(self, claimed: Message[Any]) -> None:
        """Record that the message of a claimed tick is in the queue; never raises.

        If the record cannot be written, the tick is sent again.
        """
        self._record_sent(claimed, claimed.options["claim"])
        telemetry.report_tick_sent(claimed.actor_name)

    def unsent(self) -> None:
        """Note that a tick could not be sent."""
        self._went_well = False

    def over(self) -> None:
        """Tell the outside that a wake-up has ended, and how; called at least once after each."""
        if self._went_well is not None:
            pings.send(INSTALLATION, failed=not self._went_well)
        self._went_well = None

    def dropped(self, claimed: Message[Any], skip: SkipEnqueue) -> None:
        """Record that the message of a claimed tick was dropped before it was enqueued. Never raises."""
        if skip.duplicate_of == claimed.message_id:
            # It is in the queue already, from a claim that was not confirmed.
            self._record_sent(claimed, ANY_TOKEN)
        else:
            self._record_sent(claimed, claimed.options["claim"], skip.reason)

    def tick_skipped(self, message: Message[Any] | MessageProxy, reason: str) -> None:
        """Record the outcome ``skipped`` for a tick whose message was dropped, such as a duplicate."""
        tick = tick_of(message)
        if tick is None or reason in (_ALREADY_SENT, RETRY_WAITS):
            return
        if not self._recorder.is_completed(message.actor_name, message.message_id):
            self._recorder.record(message.actor_name, "skipped", reason, tick, message.message_id)

    def _record_sent(self, claimed: Message[Any], token: str, skipped: str | None = None) -> None:
        name, tick = claimed.actor_name, tick_of(claimed)
        assert tick is not None
        row = None if skipped is None else {"outcome": "skipped", "reason": skipped, "message_id": claimed.message_id}
        try:
            with fail_message_on_error():
                last, noting = self._schedules[name].latest(tick - MINUTE), database.obj is not None
                ours, noted = self._store.record(name, tick, token, "sent", last_missed=last, noting=noting, row=row)
                self._unsent_since.pop(name, None)
                if noted:
                    self._recorder.flush(self._schedules)
                if ours and skipped is not None:
                    telemetry.report_tick_skipped(name, tick, skipped)
        except Exception as error:
            logger.error("Tick may be sent twice and runs once", worker=name, error=error_line(error))


class SetupCheck:
    """Checks whether sweeps have what they need, such as their tables. A sweep that lacks something has no ticks.

    Attributes:
      problems: Worker -> what it lacked at its last check, a `SetupProblem` of the sweeps.
    """

    def __init__(self) -> None:
        self.problems: dict[str, Any] = {}

    def __call__(self, sweep: Any) -> bool:
        """Return whether the sweep is set up; log each change once. Raises as `Sweep.lacks`."""
        problem, name = sweep.lacks(), sweep.name
        before = self.problems.pop(name, None)
        if problem is not None:
            self.problems[name] = problem
            if problem != before:
                logger.info("Worker not set up, not scheduled", worker=name, family=problem.family, text=problem.text)
        elif before is not None:
            logger.info("Worker set up, scheduled from now on", worker=name)
        return problem is None


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
            self.write(f"row.{uuid4().hex}:{_seconds(tick)}:{worker}", json.dumps(row))

    def remove(self, note: Note) -> bool:
        """Remove a note; return whether it existed."""
        return bool(self._client.hdel(self._notes, note.field))

    def write(self, field: str, value: str) -> None:
        """Write a note."""
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


#: Rows kept in memory while neither database nor Redis answers; the oldest are dropped first.
_MAX_UNWRITTEN: Final = 1000
_UNLESS_ANY: Final = "unless_any"  # in a note: write the row only if the ledger has none of this message
#: Errors that one note causes. Any other error comes from the database and stops the writing of all notes.
_UNWRITABLE: Final = (DataError, IntegrityError, ValueError, TypeError, KeyError, AttributeError)


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
            logger.info("Tick ended", worker=worker, tick=tick, outcome=outcome, reason=reason)
        if database.obj is None:
            return
        row: dict[str, Any] = {"outcome": outcome, "reason": reason, "message_id": message_id}
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
        """Move the rows that wait in memory to Redis. They are kept if it raises an error."""
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
        self.note_unwritten()
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
        if database.obj is None:
            self._store.remove(note)
        elif note.kind == "fired":
            # Removed first: if the ledger subtracted this tick twice, it would hide a missed one.
            if self._store.remove(note):
                try:
                    runs.no_longer_missed(note.worker, note.tick)
                except PeeweeException:
                    self._store.write(note.field, note.value)
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
                telemetry.report_ticks_missed(note.worker, note.tick, missed, reason)
            self._store.remove(note)
