"""What became of each tick, in the run ledger; sweeps write their own runs, this writes the rest."""

from __future__ import annotations

from collections import deque
from datetime import datetime
from typing import Any, Final

from dramatiq import Actor, Message, MessageProxy
from peewee import PeeweeException, fn

from housekeeping.foundation.db import database, one_line
from housekeeping.foundation.logs import logger as named_logger
from housekeeping.sweeps import ledger
from housekeeping.sweeps.ledger import Outcome
from housekeeping.sweeps.own_tables import Run

logger = named_logger(__name__)

_KEPT: Final = 1000  # rows kept in memory while the database is away; the oldest are given up first


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


class TickOutcomes:
    """Writes rows for ticks that have no run of a sweep; nothing without a database.

    A row that cannot be written, because the database is away, is kept in memory and written with the next one.
    """

    def __init__(self) -> None:
        self._unwritten: deque[dict[str, Any]] = deque(maxlen=_KEPT)

    def record(
        self,
        worker: str,
        outcome: Outcome,
        reason: str | None,
        tick: datetime,
        message_id: str | None = None,
        **counts: int,
    ) -> None:
        """Write one row and a log line."""
        logger.info("Tick ended", worker=worker, tick=tick, outcome=outcome, reason=reason, **counts)
        if database.obj is not None:
            self._unwritten.append(
                {
                    "worker": worker,
                    "outcome": outcome,
                    "reason": reason,
                    "message_id": message_id,
                    "tick": tick,
                    "counts": counts,
                }
            )
            self.flush()

    def flush(self) -> None:
        """Write what could not be written before."""
        while self._unwritten:
            try:
                row = self._unwritten.popleft()
            except IndexError:
                return  # another thread was quicker
            try:
                ledger.record(**row, trigger="schedule")
            except PeeweeException as error:
                self._unwritten.appendleft(row)
                logger.error("Outcome of a tick could not be recorded yet", worker=row["worker"], error=one_line(error))
                return


def last_recorded(actor: Actor[..., Any], before: datetime) -> datetime | None:
    """The actor's last tick before a moment, by the ledger; null when it cannot know.

    Raises:
      peewee.PeeweeException: The database did not answer.
    """
    if database.obj is None:
        return None
    last: datetime | None = (
        Run.select(fn.MAX(Run.tick)).where((Run.worker == actor.actor_name) & (Run.tick < before)).scalar()
    )
    return last


def ended_well(message_id: str) -> bool:
    """Whether the ledger has a completed run of this message; False when it cannot be asked."""
    if database.obj is None:
        return False
    try:
        well = (Run.outcome == "done") | ((Run.outcome == "partial") & (Run.reason != "shutdown"))
        return bool(Run.select(Run.id).where((Run.message_id == message_id) & well).exists())
    except PeeweeException as error:
        logger.error("The ledger could not be asked", message_id=message_id, error=one_line(error))
        return False
