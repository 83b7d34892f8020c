"""Gives actors a schedule for periodiq, and each of its ticks at most one message and one outcome."""

from __future__ import annotations

import dataclasses
import inspect
import sys
import time
from datetime import UTC, datetime, timedelta, tzinfo
from typing import Any, Final, Literal
from uuid import NAMESPACE_URL, uuid4, uuid5

import redis
from dramatiq import Actor, Broker, Message, MessageProxy, Middleware
from dramatiq.middleware import Shutdown
from peewee import PeeweeException

from housekeeping.core.cron import Cron
from housekeeping.core.errors import DeclarationError, LeaseLost
from housekeeping.core.middleware_errors import InvalidOption, Requeue, Skip, SkipEnqueue, fail_message_on_error
from housekeeping.core.sanitize import error_line
from housekeeping.core.telemetry import metrics
from housekeeping.core.telemetry.logs import logger as named_logger
from housekeeping.core.thread_interrupt import LostLease
from housekeeping.middleware.deduplication.options import RETRY_WAITS
from housekeeping.middleware.schedule.tick_recorder import (
    TickRecorder,
    ended_well,
    last_recorded,
    row_of,
    said,
    tick_of,
    writes_its_own,
)
from housekeeping.middleware.schedule.tick_store import ANY_TOKEN, TickStore
from housekeeping.middleware.setup_checks import SetupChecks
from housekeeping.middleware.telemetry.heartbeats import SchedulerHeartbeats

logger = named_logger(__name__)

_MINUTE: Final = timedelta(minutes=1)
_SETTLED: Final = "tick_already_sent"  # the reason of a message that is dropped for its tick has had its outcome


class Schedule(Middleware):
    """Middleware for actors that run by the clock.

    An actor opts in by saying when::

        @dramatiq.actor(schedule="*/6 * * * *")
        def sweep() -> None: ...

    ``periodiq module`` sends the messages; any number of schedulers may run. A tick is claimed in
    Redis for some seconds while its message is enqueued, and settled when it is in the queue: a
    scheduler that dies in between leaves the tick to the next wake-up, and where its message came twice,
    one runs. The latest tick that was missed, while no scheduler ran or Redis was away, is made up once;
    all others are recorded as missed.

    Parameters:
      client: Where ticks are claimed.
      zone: Whose clock the schedules are read on.
      catch_up: ``latest`` or ``none``: whether the latest missed tick is made up.
    """

    def __init__(
        self,
        client: redis.Redis,
        namespace: str,
        zone: tzinfo = UTC,
        catch_up: Literal["latest", "none"] = "latest",
    ) -> None:
        self._namespace = namespace
        self._zone = zone
        self._catch_up = catch_up
        self._memory = TickStore(client, namespace)
        self._outcomes = TickRecorder(self._memory)
        self._heartbeats = SchedulerHeartbeats(client, namespace)
        self._setup = SetupChecks()
        self._schedules: dict[str, Cron] = {}
        self._away_at: datetime | None = None
        self._flushed_at: datetime | None = None
        #: By actor: the last tick that was over when its memory was last seen, or else when this process began to ask.
        self._began_after: dict[str, datetime] = {}

    @property
    def actor_options(self) -> set[str]:
        return {"schedule", "periodic"}

    def before_declare_actor(self, broker: Broker, actor: Actor[..., Any]) -> None:
        # An application's own `periodic=periodiq.cron(...)` as well: periodiq's CronSpec never fires on some days.
        spec = actor.options.get("schedule") or actor.options.get("periodic")
        if spec is None:
            return
        try:
            # A copy in any case: two actors that share one would answer for each other.
            cron = Cron(spec.spec, spec.zone) if isinstance(spec, Cron) else Cron(str(spec), self._zone)
            inspect.signature(actor.fn).bind()
        except DeclarationError as error:
            raise InvalidOption(f"{actor.actor_name}: {error}") from None
        except TypeError as error:
            raise InvalidOption(f"{actor.actor_name}: a schedule sends no arguments: {error}") from None
        cron.due = lambda cron, now: self.is_due(actor, cron, now)
        actor.options["periodic"] = self._schedules[actor.actor_name] = cron
        metrics.TICKS_SENT.add(actor.actor_name, number=0)
        metrics.TICKS_MISSED.add(actor.actor_name, number=0)

    def before_process_message(self, broker: Broker, message: MessageProxy) -> None:
        """Let one message of a tick run: not a second one, nor one whose tick was counted as missed meanwhile."""
        tick, token = tick_of(message), message.options.get("claim")
        cron = self._schedules.get(message.actor_name)
        if tick is None or not isinstance(token, str) or cron is None:
            return
        how: Literal["begun", "retried"] = "retried" if "retries" in message.options else "begun"
        with fail_message_on_error():
            ours, _ = self._memory.settle(
                message.actor_name,
                tick,
                token,
                how,
                last_missed=cron.latest(tick - _MINUTE),
                noting=self._outcomes.has_ledger,
            )
        if not ours:
            raise Skip(_SETTLED)

    def after_process_message(
        self, broker: Broker, message: MessageProxy, *, result: Any = None, exception: BaseException | None = None
    ) -> None:
        self._outcomes.hand_on()
        tick = tick_of(message)
        if tick is None or isinstance(exception, Requeue | Shutdown):
            return
        name, message_id = message.actor_name, message.message_id
        if writes_its_own(broker.get_actor(name)):
            if exception is not None:
                self._outcomes.make_sure(name, error_line(exception), tick, message_id)
        elif exception is None:
            self._outcomes.record(name, "done", None, tick, message_id)
        elif isinstance(exception, LostLease | LeaseLost):
            self._outcomes.record(name, "lost_lease", "lease_lost", tick, message_id)
        else:
            self._outcomes.record(name, "failed", error_line(exception), tick, message_id)

    def after_skip_message(self, broker: Broker, message: MessageProxy) -> None:
        self._outcomes.hand_on()
        # Dramatiq calls this hook while it handles the SkipMessage, and does not pass it on.
        skip = sys.exception()
        self.tick_skipped(message, "skipped" if skip is None else error_line(skip))

    def is_due(self, actor: Actor[..., Any], cron: Cron, now: datetime) -> bool:
        """Whether the actor's latest tick is still to be sent; asked by periodiq once a minute. Never raises."""
        self._heartbeats.wake()
        if not self._setup.is_set_up(actor, now):
            # Its schedule begins after this tick, once it is set up; none was missed before.
            self._began_after[actor.actor_name] = cron.latest(now)
            return False
        self._began_after.setdefault(actor.actor_name, _last_before(cron, now))
        if self._away_at == now:
            return False  # each actor's own wait for an answer would add up to more than a minute
        try:
            with fail_message_on_error():
                if self._flushed_at != now:
                    self._outcomes.flush(self._schedules)
                    self._flushed_at = now
                return self._is_due(actor, cron, now)
        except Exception as error:
            self._away_at = now
            logger.error(
                "Ticks cannot be asked for, tried again in a minute", worker=actor.actor_name, error=error_line(error)
            )
            return False

    def _is_due(self, actor: Actor[..., Any], cron: Cron, now: datetime) -> bool:
        tick = cron.latest(now)
        in_its_minute = now - tick < _MINUTE
        seen = self._memory.look(actor.actor_name, tick)
        if seen.any:
            self._began_after[actor.actor_name] = _last_before(cron, now)
        if seen.settled or seen.being_sent:
            return False
        known = seen.any
        if not known:
            try:
                # A new actor, or Redis came back empty: then the ledger remembers.
                last = last_recorded(actor, tick + _MINUTE)
            except PeeweeException as error:
                logger.error("The ledger could not be asked", worker=actor.actor_name, error=error_line(error))
                return in_its_minute
            if last is None and self._began_after[actor.actor_name] < _last_before(cron, now):
                last = self._began_after[actor.actor_name]  # Redis was away since the first that is ever known of it
            if last is not None:
                self._memory.remember(actor.actor_name, last)
                known = True
            if last == tick:
                return False
        if in_its_minute or (known and self._catch_up == "latest"):
            return True
        if known:
            # BatchResult, so that its message is not run should it be in the queue in spite of all.
            self._settle(actor.actor_name, tick, uuid4().hex, "missed")
        else:
            # No more than the tick before it: that is how a new actor's memory begins.
            self._memory.remember(actor.actor_name, tick)
        return False

    def claim(self, broker: Broker, message: Message[Any]) -> Message[Any]:
        """The message with its tick named, claimed for it alone; any message but periodiq's own as it is.

        Its message id follows from the tick: should the tick be sent again in spite of all (Redis came back
        empty within the minute), an idempotent actor still executes it once.

        Raises:
          SkipEnqueue: When the tick was sent before, or is just being sent.
          StoreUnavailable: When Redis is away; a claim it may have made all the same ends by itself.
        """
        # Of another service, or of another release: there is no such actor here.
        actor = broker.actors.get(message.actor_name)
        cron = None if actor is None else actor.options.get("periodic")
        if actor is None or not isinstance(cron, Cron) or not sent_by_scheduler(message):
            return message
        tick = cron.latest(datetime.fromisoformat(message.options["scheduled_at"]))
        token = uuid4().hex
        with fail_message_on_error():
            free = self._memory.claim(actor.actor_name, tick, token, cron.latest(tick - _MINUTE))
        if not free:
            raise SkipEnqueue(_SETTLED)
        # Without `scheduled_at`, by which periodiq's own middleware would drop late messages and retries.
        options = {name: value for name, value in message.options.items() if name != "scheduled_at"}
        name = f"{self._namespace}:ticks:{actor.actor_name}:{int(tick.timestamp())}"
        return dataclasses.replace(
            message,
            message_id=str(uuid5(NAMESPACE_URL, name)),
            options={**options, "tick": tick.isoformat(), "claim": token},
        )

    def sent(self, claimed: Message[Any]) -> None:
        """Settle the tick of a claimed message that is in the queue. Never raises: unsaid, the tick is sent again."""
        self._settle_sent(claimed, claimed.options["claim"])
        metrics.TICKS_SENT.add(claimed.actor_name)
        metrics.LAST_TICK.set(time.time(), claimed.actor_name)

    def dropped(self, claimed: Message[Any], skip: SkipEnqueue) -> None:
        """Settle the tick of a claimed message that was dropped on its way into the queue. Never raises either."""
        if skip.duplicate_of == claimed.message_id:
            # It is there already, from a claim that nobody confirmed.
            self._settle_sent(claimed, ANY_TOKEN)
        else:
            self._settle_sent(claimed, claimed.options["claim"], skip.reason)

    def tick_skipped(self, message: Message[Any] | MessageProxy, reason: str) -> None:
        """Record the outcome of a tick whose message was dropped, for instance as a duplicate."""
        tick = tick_of(message)
        if tick is not None and reason not in (_SETTLED, RETRY_WAITS) and not ended_well(message.message_id):
            self._outcomes.record(message.actor_name, "skipped", reason, tick, message.message_id)

    def _settle_sent(self, claimed: Message[Any], token: str, skipped: str | None = None) -> None:
        tick = tick_of(claimed)
        assert tick is not None
        row = None if skipped is None else row_of("skipped", skipped, claimed.message_id)
        try:
            with fail_message_on_error():
                if self._settle(claimed.actor_name, tick, token, "sent", row) and skipped is not None:
                    said(claimed.actor_name, "skipped", skipped, tick)
        except Exception as error:
            logger.error("A tick may be sent twice, to run once", worker=claimed.actor_name, error=error_line(error))

    def _settle(
        self,
        actor: str,
        tick: datetime,
        token: str,
        how: Literal["sent", "missed"],
        row: dict[str, Any] | None = None,
    ) -> bool:
        last_missed = tick if how == "missed" else self._schedules[actor].latest(tick - _MINUTE)
        ours, noted = self._memory.settle(
            actor, tick, token, how, last_missed=last_missed, noting=self._outcomes.has_ledger, row=row
        )
        if noted:
            self._outcomes.flush(self._schedules)
        return ours


def _last_before(cron: Cron, now: datetime) -> datetime:
    """The last tick that is over; one in whose minute it is now is not."""
    tick = cron.latest(now)
    return cron.latest(tick - _MINUTE) if now - tick < _MINUTE else tick


def sent_by_scheduler(message: Message[Any]) -> bool:
    """Whether periodiq made this message just now; its retries are no longer the scheduler's."""
    return "scheduled_at" in message.options and "tick" not in message.options
