"""Schedules: actors that run at ticks, each tick with at most one message and exactly one outcome.

Once a minute, when periodiq asks, the scheduler decides whether an actor's latest tick is sent. `ticks` records in
Redis which ticks were sent or missed, and writes their outcomes to the run ledger.
"""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime, tzinfo
from functools import partial
from typing import Any, Final, Literal
from uuid import NAMESPACE_URL, uuid5

import redis
from dramatiq import Actor, Broker, Message, MessageProxy, Middleware
from dramatiq.middleware import Shutdown
from peewee import PeeweeException

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
from housekeeping.core.logs import error_line
from housekeeping.core.logs import logger as named_logger
from housekeeping.core.pings import INSTALLATION, pings
from housekeeping.ledger.runs import MINUTE
from housekeeping.middleware.keys import RETRY_WAITS, signature_of
from housekeeping.middleware.observe import SchedulerHeartbeats
from housekeeping.middleware.ticks import (
    ANY_TOKEN,
    TickRecorder,
    TickStore,
    log_tick,
    new_token,
    outcome_row,
    records_its_runs,
    tick_of,
)

logger = named_logger(__name__)


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
        #: By sweep: what it lacks, a `SetupProblem` of the sweeps.
        self._problems: dict[str, Any] = {}
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
                noting=self._recorder.has_ledger,
            )
        if not ours:
            raise SkipDelivery(_ALREADY_SENT)

    def after_process_message(
        self, broker: Broker, message: MessageProxy, *, result: Any = None, exception: BaseException | None = None
    ) -> None:
        self._recorder.note_unwritten()
        tick = tick_of(message)
        if tick is None or isinstance(exception, Requeue | Shutdown):
            return
        name, message_id = message.actor_name, message.message_id
        if records_its_runs(broker.get_actor(name)):
            if exception is not None:
                self._recorder.record(name, "failed", error_line(exception), tick, message_id, unless_any=True)
        elif exception is None:
            self._recorder.record(name, "done", None, tick, message_id)
        elif isinstance(exception, LostLease | LeaseLost):
            self._recorder.record(name, "lost_lease", "lease_lost", tick, message_id)
        else:
            self._recorder.record(name, "failed", error_line(exception), tick, message_id)

    def after_skip_message(self, broker: Broker, message: MessageProxy) -> None:
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
        self._began_after.setdefault(name, _last_before(cron, now))
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
            logger.error("Ticks could not be checked, tried again in a minute", worker=name, error=error_line(error))
            return False
        if not due:
            self._unsent_since.pop(name, None)
        return due

    def _is_due(self, name: str, cron: Cron, now: datetime) -> bool:
        tick = cron.latest(now)
        in_its_minute = now - tick < MINUTE
        state = self._store.state_of(name, tick)
        if state.actor_known:
            self._began_after[name] = _last_before(cron, now)
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
            if last is None and self._began_after[name] < _last_before(cron, now):
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
        token, noting = new_token(self._unsent_since.get(name)), self._recorder.has_ledger
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
            return name not in self._problems
        try:
            problem = sweep.lacks()
        except (PeeweeException, HousekeepingError) as error:
            self._setup_unknown_at[sweep.database] = now
            logger.warning("Setup could not be checked", worker=name, error=error_line(error))
            return name not in self._problems
        before = self._problems.pop(name, None)
        if problem is not None:
            self._problems[name] = problem
            if problem != before:
                logger.info("Worker not set up, not scheduled", worker=name, family=problem.family, text=problem.text)
        elif before is not None:
            logger.info("Worker set up, scheduled from now on", worker=name)
        return problem is None

    def claim(self, broker: Broker, message: Message[Any]) -> Message[Any]:
        """Claim the tick of a message from periodiq and return the message with its tick; return others unchanged.

        The message id is derived from the tick. If Redis loses its data within the minute and the tick is sent again,
        an idempotent actor still executes it once.

        Raises:
          SkipEnqueue: The tick was sent before, or is being sent.
          StoreUnavailable: Redis does not answer. It may have made the claim, which then expires.
        """
        # Another service or release may have actors that are unknown here.
        actor = broker.actors.get(message.actor_name)
        cron = None if actor is None else actor.options.get("periodic")
        if actor is None or not isinstance(cron, Cron) or not sent_by_scheduler(message):
            return message
        tick = cron.latest(datetime.fromisoformat(message.options["scheduled_at"]))
        token = new_token(self._unsent_since.get(actor.actor_name))
        with fail_message_on_error():
            free = self._store.claim(actor.actor_name, tick, token, cron.latest(tick - MINUTE))
        if not free:
            self._unsent_since.pop(actor.actor_name, None)
            raise SkipEnqueue(_ALREADY_SENT)
        # Without `scheduled_at`: periodiq's own middleware would drop late messages and retries because of it.
        options = {name: value for name, value in message.options.items() if name != "scheduled_at"}
        name = f"{self._namespace}:ticks:{actor.actor_name}:{int(tick.timestamp())}"
        return dataclasses.replace(
            message,
            message_id=str(uuid5(NAMESPACE_URL, name)),
            options={**options, "tick": tick.isoformat(), "claim": token},
        )

    def sent(self, claimed: Message[Any]) -> None:
        """Record that the message of a claimed tick is in the queue; never raises.

        If the record cannot be written, the tick is sent again.
        """
        self._record_sent(claimed, claimed.options["claim"])
        telemetry.TICKS_SENT.add(claimed.actor_name)
        telemetry.LAST_TICK.set(time.time(), claimed.actor_name)

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
        tick = tick_of(claimed)
        assert tick is not None
        row = None if skipped is None else outcome_row("skipped", skipped, claimed.message_id)
        try:
            with fail_message_on_error():
                ours, noted = self._store.record(
                    claimed.actor_name,
                    tick,
                    token,
                    "sent",
                    last_missed=self._schedules[claimed.actor_name].latest(tick - MINUTE),
                    noting=self._recorder.has_ledger,
                    row=row,
                )
                self._unsent_since.pop(claimed.actor_name, None)
                if noted:
                    self._recorder.flush(self._schedules)
                if ours and skipped is not None:
                    log_tick(claimed.actor_name, "skipped", skipped, tick)
        except Exception as error:
            logger.error("Tick may be sent twice and runs once", worker=claimed.actor_name, error=error_line(error))


def _last_before(cron: Cron, now: datetime) -> datetime:
    """Return the last tick whose minute has passed."""
    tick = cron.latest(now)
    return cron.latest(tick - MINUTE) if now - tick < MINUTE else tick


def sent_by_scheduler(message: Message[Any]) -> bool:
    """Return whether this message comes directly from periodiq and is no retry."""
    return "scheduled_at" in message.options and "tick" not in message.options
