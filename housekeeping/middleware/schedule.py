"""Gives actors a schedule for periodiq, and each of its ticks at most one message."""

from __future__ import annotations

import dataclasses
import inspect
import sys
from collections import deque
from datetime import UTC, datetime, timedelta, tzinfo
from typing import Any, Final, Literal
from uuid import NAMESPACE_URL, uuid4, uuid5

import redis
from dramatiq import Actor, Broker, Message, MessageProxy, Middleware
from dramatiq.middleware import Shutdown
from peewee import PeeweeException

from housekeeping.foundation.cron import Cron
from housekeeping.foundation.db import one_line
from housekeeping.foundation.errors import DeclarationError
from housekeeping.foundation.logs import logger as named_logger
from housekeeping.foundation.steering import InvalidOption, PutBack, SkipEnqueue, failing_the_message
from housekeeping.middleware.tick_outcomes import TickOutcomes, ended_well, last_recorded, tick_of, writes_its_own

logger = named_logger(__name__)

_MINUTE: Final = timedelta(minutes=1)
#: Ticks remembered for each actor: a day of minutes and an hour, for clocks that step.
_REMEMBERED: Final = 1500
#: Longer than the longest common period, a year, so that a missed tick is known to have been missed.
_FORGOTTEN_AFTER: Final = timedelta(days=400)
_COUNTED: Final = 600_000  # missed ticks are counted up to here, a year of minutes and more: a second's work

#: KEYS[1] is the actor's sorted set of settled ticks, scored by time, each with a token of who settled it.
#: ARGV: the tick, the token, how many to remember, the ttl in ms. Returns whether the tick was still free,
#: and the tick before it. A tick older than all that are remembered is not free: nobody knows. Repeating it
#: with the same token changes nothing, so a client may ask again after a lost answer.
_CLAIM: Final = """
local member = ARGV[1] .. ":" .. ARGV[2]
local there = redis.call("zrangebyscore", KEYS[1], ARGV[1], ARGV[1])
if there[1] and there[1] ~= member then return {0, ""} end
local before = redis.call("zrevrangebyscore", KEYS[1], "(" .. ARGV[1], "-inf", "limit", 0, 1)
if not before[1] and redis.call("zcard", KEYS[1]) >= tonumber(ARGV[3]) then return {0, ""} end
redis.call("zadd", KEYS[1], ARGV[1], member)
redis.call("zremrangebyrank", KEYS[1], 0, -tonumber(ARGV[3]) - 1)
redis.call("pexpire", KEYS[1], ARGV[4])
return {1, before[1] or ""}
"""


class Schedule(Middleware):
    """Middleware for actors that run by the clock.

    An actor opts in by saying when::

        @dramatiq.actor(schedule="*/6 * * * *")
        def sweep() -> None: ...

    ``periodiq module`` sends the messages; any number of schedulers may run. A tick is claimed in
    Redis when its message is enqueued, so it fires at most once. The latest tick that was missed,
    while no scheduler ran or Redis was away, is made up once; all others are recorded as missed.

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
        self._client = client
        self._prefix = f"{namespace}:ticks:"
        self._zone = zone
        self._catch_up = catch_up
        self._outcomes = TickOutcomes()
        self._claim: Any = client.register_script(_CLAIM)
        #: Claims whose message did not reach the queue (actor, tick, token); given back as soon as Redis answers.
        self._unsent: deque[tuple[Actor[..., Any], datetime, str]] = deque()
        self._away_at: datetime | None = None

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
        actor.options["periodic"] = cron

    def after_process_message(
        self, broker: Broker, message: MessageProxy, *, result: Any = None, exception: BaseException | None = None
    ) -> None:
        tick = tick_of(message)
        if tick is None or writes_its_own(broker.get_actor(message.actor_name)):
            return
        if exception is None:
            self._outcomes.record(message.actor_name, "done", None, tick, message.message_id)
        elif not isinstance(exception, PutBack | Shutdown):
            self._outcomes.record(message.actor_name, "failed", one_line(exception), tick, message.message_id)

    def after_skip_message(self, broker: Broker, message: MessageProxy) -> None:
        # Dramatiq calls this hook while it handles the SkipMessage, and does not pass it on.
        self.tick_skipped(message, str(sys.exception() or "skipped"))

    def is_due(self, actor: Actor[..., Any], cron: Cron, now: datetime) -> bool:
        """Whether the actor's latest tick is still to be sent; asked by periodiq once a minute. Never raises."""
        if self._away_at == now:
            return False  # each actor's own wait for an answer would add up to more than a minute
        try:
            self._outcomes.flush()
            with failing_the_message():
                return self._is_due(actor, cron, now)
        except Exception as error:
            self._away_at = now
            logger.error(
                "Ticks cannot be asked for, tried again in a minute", worker=actor.actor_name, error=one_line(error)
            )
            return False

    def _is_due(self, actor: Actor[..., Any], cron: Cron, now: datetime) -> bool:
        while self._unsent:
            self._give_back(*self._unsent[0])
            self._unsent.popleft()
        tick, key = cron.latest(now), self._prefix + actor.actor_name
        if self._client.zcount(key, _seconds(tick), _seconds(tick)):
            return False
        if now - tick < _MINUTE:
            return True
        # Redis may have come back empty: then the ledger remembers.
        missed = bool(self._client.exists(key)) or last_recorded(actor, tick + _MINUTE) not in (None, tick)
        if missed and self._catch_up == "latest":
            return True
        # Not to be sent: settled all the same, so that the next gap begins here. That is also how a new
        # actor's memory begins, with no more than the tick before it.
        free, before = self._settle(actor, tick, uuid4().hex)
        if free and missed:
            self._record_missed(actor, cron, before, tick)
        return False

    def claim(self, broker: Broker, message: Message[Any]) -> Message[Any]:
        """The message with its tick named, claimed for it alone; any message but periodiq's own as it is.

        Its message id follows from the tick: should the tick be sent again in spite of all (Redis came back
        empty within the minute), an idempotent actor still executes it once.

        Raises:
          SkipEnqueue: When the tick was sent before.
          StoreUnavailable: When Redis is away; a claim it may have made all the same is given back later.
        """
        actor = broker.get_actor(message.actor_name)
        cron = actor.options.get("periodic")
        if not sent_by_scheduler(message) or not isinstance(cron, Cron):
            return message
        tick = cron.latest(datetime.fromisoformat(message.options["scheduled_at"]))
        token = uuid4().hex
        try:
            with failing_the_message():
                free, before = self._settle(actor, tick, token)
        except Exception:
            self._unsent.append((actor, tick, token))
            raise
        if not free:
            raise SkipEnqueue("tick_already_sent")
        self._record_missed(actor, cron, before, cron.latest(tick - _MINUTE))
        # Without `scheduled_at`, by which periodiq's own middleware would drop late messages and retries.
        options = {name: value for name, value in message.options.items() if name != "scheduled_at"}
        return dataclasses.replace(
            message,
            message_id=str(uuid5(NAMESPACE_URL, f"{self._prefix}{actor.actor_name}:{_seconds(tick)}")),
            options={**options, "tick": tick.isoformat(), "claim": token},
        )

    def forget(self, broker: Broker, message: Message[Any]) -> None:
        """Give the message's tick back at the next wake-up, because the message could not be enqueued."""
        tick = tick_of(message)
        if tick is not None:
            self._unsent.append((broker.get_actor(message.actor_name), tick, message.options["claim"]))

    def tick_skipped(self, message: Message[Any] | MessageProxy, reason: str) -> None:
        """Record the outcome of a tick whose message was dropped, for instance as a duplicate."""
        tick = tick_of(message)
        if tick is not None and not ended_well(message.message_id):
            self._outcomes.record(message.actor_name, "skipped", reason, tick, message.message_id)

    def _give_back(self, actor: Actor[..., Any], tick: datetime, token: str) -> None:
        key = self._prefix + actor.actor_name
        self._client.zrem(key, f"{_seconds(tick)}:{token}")
        if not self._client.exists(key):
            # It was the first tick ever; without a memory it would not count as missed.
            before = _seconds(actor.options["periodic"].latest(tick - _MINUTE))
            self._client.zadd(key, {f"{before}:{token}": before})

    def _settle(self, actor: Actor[..., Any], tick: datetime, token: str) -> tuple[bool, datetime | None]:
        """Claim the tick; whether it was free, and the last tick before it that is known of."""
        free, before = self._claim(
            keys=[self._prefix + actor.actor_name],
            args=[_seconds(tick), token, _REMEMBERED, int(_FORGOTTEN_AFTER.total_seconds() * 1000)],
        )
        if before:
            seconds = before.partition(b":")[0] if isinstance(before, bytes) else before.partition(":")[0]
            return bool(free), datetime.fromtimestamp(int(seconds), UTC)
        if not free:
            return False, None
        try:
            return True, last_recorded(actor, tick)
        except PeeweeException as error:
            logger.error("The ledger could not be asked", worker=actor.actor_name, error=one_line(error))
            return True, None

    def _record_missed(self, actor: Actor[..., Any], cron: Cron, after: datetime | None, last: datetime) -> None:
        if after is not None and after < last:
            missed = cron.count(after, last, _COUNTED)
            self._outcomes.record(actor.actor_name, "missed", "no_scheduler", last, missed=missed)


def sent_by_scheduler(message: Message[Any]) -> bool:
    """Whether periodiq made this message just now; its retries are no longer the scheduler's."""
    return "scheduled_at" in message.options and "tick" not in message.options


def _seconds(moment: datetime) -> int:
    return int(moment.timestamp())
