"""Gives actors a schedule for periodiq, and each of its ticks at most one message."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, tzinfo
from typing import Any, Final, Literal

import redis
from dramatiq import Actor, Broker, Message, MessageProxy, Middleware
from peewee import PeeweeException

from housekeeping.foundation.cron import Cron
from housekeeping.foundation.db import database, one_line
from housekeeping.foundation.errors import DeclarationError
from housekeeping.foundation.logs import logger as named_logger
from housekeeping.foundation.steering import InvalidOption, SkipEnqueue, failing_the_message
from housekeeping.sweeps import ledger
from housekeeping.sweeps.ledger import Outcome

logger = named_logger(__name__)

_MINUTE: Final = timedelta(minutes=1)
#: Ticks remembered for each actor: a day of minutes and an hour, for clocks that step.
_REMEMBERED: Final = 1500
#: Longer than the longest common period, a year, so that a missed tick is known to have been missed.
_FORGOTTEN_AFTER: Final = timedelta(days=400)

#: KEYS[1] is the actor's sorted set of ticks sent; ARGV the tick, how many to remember, the ttl in ms.
#: Returns whether the tick was still free, and the tick sent before it.
_CLAIM: Final = """
local free = redis.call("zadd", KEYS[1], "nx", ARGV[1], ARGV[1])
redis.call("zremrangebyrank", KEYS[1], 0, -tonumber(ARGV[2]) - 1)
redis.call("pexpire", KEYS[1], ARGV[3])
local before = redis.call("zrevrangebyscore", KEYS[1], "(" .. ARGV[1], "-inf", "limit", 0, 1)
return {free, before[1] or ""}
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
        self._claim: Any = client.register_script(_CLAIM)

    @property
    def actor_options(self) -> set[str]:
        return {"schedule", "periodic"}

    def before_declare_actor(self, broker: Broker, actor: Actor[..., Any]) -> None:
        spec = actor.options.get("schedule")
        if spec is None:
            return
        try:
            cron = Cron(spec, self._zone)
        except DeclarationError as error:
            raise InvalidOption(f"{actor.actor_name}: {error}") from None
        name = actor.actor_name
        cron.due = lambda cron, now: self.is_due(name, cron, now)
        actor.options["periodic"] = cron

    def is_due(self, actor_name: str, cron: Cron, now: datetime) -> bool:
        """Whether the actor's latest tick is still to be sent; asked by periodiq once a minute."""
        tick = cron.latest(now)
        try:
            with failing_the_message():
                key = self._prefix + actor_name
                sent = self._client.zscore(key, _seconds(tick)) is not None
                known = bool(self._client.exists(key))
        except Exception as error:
            logger.error("Ticks cannot be asked for, tried again in a minute", worker=actor_name, error=one_line(error))
            return False
        this_minute = now - tick < _MINUTE
        return not sent and (this_minute or (known and self._catch_up == "latest"))

    def claim(self, broker: Broker, message: Message[Any]) -> Message[Any]:
        """The message with its tick named, claimed for it alone; any message but periodiq's own as it is.

        Raises:
          SkipEnqueue: When the tick was sent before.
          StoreUnavailable: When Redis is away; the tick may be claimed, see `forget`.
        """
        cron = broker.get_actor(message.actor_name).options.get("periodic")
        if not sent_by_scheduler(message) or not isinstance(cron, Cron):
            return message
        tick = cron.latest(datetime.fromisoformat(message.options["scheduled_at"]))
        with failing_the_message():
            free, before = self._claim(
                keys=[self._prefix + message.actor_name],
                args=[_seconds(tick), _REMEMBERED, int(_FORGOTTEN_AFTER.total_seconds() * 1000)],
            )
        if not free:
            raise SkipEnqueue("tick_already_sent")
        if before:
            self._record_missed(message.actor_name, cron, datetime.fromtimestamp(int(before), UTC), tick)
        return message.copy(options={"tick": tick.isoformat()})

    def forget(self, message: Message[Any]) -> None:
        """Give the message's tick back, because the message could not be enqueued."""
        tick = tick_of(message)
        if tick is not None:
            try:
                self._client.zrem(self._prefix + message.actor_name, _seconds(tick))
            except redis.RedisError as error:
                logger.error("Tick could not be given back", worker=message.actor_name, error=one_line(error))

    def tick_skipped(self, message: Message[Any], reason: str) -> None:
        """Record the outcome of a tick whose message was dropped, for instance as a duplicate."""
        tick = tick_of(message)
        if tick is not None:
            self._record(message.actor_name, "skipped", reason, tick, {}, message.message_id)

    def _record_missed(self, actor_name: str, cron: Cron, before: datetime, tick: datetime) -> None:
        last_missed = cron.latest(tick - _MINUTE)
        if last_missed <= before:
            return
        # A minutely actor's year; beyond that the number says "at least".
        missed = cron.count(before, last_missed, limit=600_000)
        self._record(actor_name, "missed", "no_scheduler", last_missed, {"missed": missed}, None)

    def _record(
        self, name: str, outcome: Outcome, reason: str, tick: datetime, counts: dict[str, int], message_id: str | None
    ) -> None:
        logger.info("Tick ended", worker=name, tick=tick, outcome=outcome, reason=reason, **counts)
        if database.obj is None:
            return
        try:
            ledger.record(
                name, outcome, reason, message_id=message_id, tick=tick, trigger="schedule", counts=dict(counts)
            )
        except PeeweeException as error:
            logger.error("Tick could not be recorded", worker=name, tick=tick, error=one_line(error))


def sent_by_scheduler(message: Message[Any]) -> bool:
    """Whether periodiq made this message just now; its retries are no longer the scheduler's."""
    return "scheduled_at" in message.options and "tick" not in message.options


def tick_of(message: Message[Any] | MessageProxy) -> datetime | None:
    """The nominal time the message stands for; null when no schedule sent it."""
    tick = message.options.get("tick")
    return datetime.fromisoformat(tick) if isinstance(tick, str) else None


def _seconds(moment: datetime) -> int:
    return int(moment.timestamp())
