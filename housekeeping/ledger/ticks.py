"""Ticks of an installation without Redis: which were sent, and which process runs them.

The database ``main`` has a row for each sent tick, which is due at once. A process takes the tick, keeps it as long as
it sends heartbeats, and ends it after the run. The tick of a dead process becomes due again. The ledger ensures that
its work is done once: all attempts have the same message id, and each attempt closes the row of the previous one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from datetime import datetime, timedelta
from typing import Any, Final, NamedTuple
from uuid import NAMESPACE_URL, uuid5

from peewee import SQL, Value, fn

from housekeeping.brokers import QueueLengths
from housekeeping.core.cron import Cron
from housekeeping.core.settings import MAIN
from housekeeping.database.connection import database, translate_postgres_errors
from housekeeping.ledger import runs
from housekeeping.ledger.processes import SILENCE
from housekeeping.ledger.runs import MINUTE
from housekeeping.ledger.schema import NOW, TickRow

#: Another process may have the other workers, so their ticks are kept as long as the ledger's rows by default.
_FORGOTTEN_AFTER: Final = timedelta(days=30)


class TakenTick(NamedTuple):
    """A tick that a process runs."""

    worker: str
    tick: datetime
    message_id: str
    retries: int


class SentTick(NamedTuple):
    """Result of sending a worker's latest tick.

    Attributes:
      is_sent: Whether it will run.
      reason: ``deduplicated`` if it is skipped because an earlier tick still waits; otherwise None.
      missed: Number of missed ticks that were recorded. Includes this one if it is neither sent nor skipped.
      missed_reason: Why they were missed.
    """

    tick: datetime
    is_sent: bool
    reason: str | None = None
    missed: int = 0
    missed_reason: str = runs.NO_SCHEDULER


def last_sent() -> dict[str, datetime]:
    """Return the last stored tick of each worker."""
    with database.using(MAIN):
        rows: Any = TickRow.select(TickRow.worker, fn.MAX(TickRow.tick)).group_by(TickRow.worker).tuples()
        return dict(rows)


def send(
    worker: str, cron: Cron, now: datetime, *, place: str = MAIN, catch_up: bool, unsent_since: datetime | None = None
) -> SentTick | None:
    """Send the worker's latest tick and record the missed ticks before it; None if it was already sent or recorded.

    If the database's clock was set back, ticks that have an outcome are not sent again. Those that were counted as
    missed are sent in their minute, and count no longer.

    Parameters:
      now: The database's time.
      place: The database with the worker's ledger.
      catch_up: Whether to send a tick whose minute has passed.
      unsent_since: Time since which this process could not send ticks; None if it could.
    """
    tick = cron.latest(now)
    with database.using(MAIN), database.atomic():
        runs.lock_ticks(worker)
        last, is_set_back = _last(worker, tick, place)
        in_its_minute = now - tick < MINUTE
        if (last is not None and last >= tick) or (is_set_back and not in_its_minute):
            return None
        is_sent = in_its_minute or (last is not None and catch_up)
        missed, reason = 0, runs.NO_SCHEDULER
        if last is not None and not is_set_back:
            if unsent_since is not None and cron.next(last) > unsent_since - MINUTE:
                reason = runs.NOT_SENT
            until = cron.latest(tick - MINUTE) if is_sent else tick
            with database.using(place):
                missed = runs.record_missed(worker, cron, last, until, reason) if until > last else 0
        earlier = (TickRow.worker == worker) & (TickRow.tick < tick) & TickRow.due_at.is_null(False)
        duplicate = is_sent and TickRow.select(TickRow.worker).where(earlier & (TickRow.attempts == 0)).exists()
        message_id = message_id_of(worker, tick)
        with database.using(place):
            if duplicate:
                given: dict[str, Any] = {"message_id": message_id, "tick": tick, "trigger": "schedule"}
                runs.record(worker, "skipped", "deduplicated", **given)
            elif is_sent:
                _end_retries(worker, earlier)
            if is_set_back:
                runs.no_longer_missed(worker, tick)
        _store(worker, tick, NOW if is_sent and not duplicate else None)
    return SentTick(tick, is_sent and not duplicate, "deduplicated" if duplicate else None, missed, reason)


def _last(worker: str, tick: datetime, place: str) -> tuple[datetime | None, bool]:
    """Return the worker's last tick up to this one, and whether a later one was sent.

    Its ledger has the ticks that a scheduler with Redis has sent.
    """
    newest = fn.MAX(TickRow.tick)
    sent: Any = TickRow.select(newest.filter(TickRow.tick <= tick), newest).where(TickRow.worker == worker).tuples()
    last, latest = sent.get()
    with database.using(place):
        recorded = runs.last_tick(worker, tick + MINUTE)
    known = max((each for each in (last, recorded) if each is not None), default=None)
    return known, latest is not None and latest > tick


def _end_retries(worker: str, earlier: Any) -> None:
    """End the waiting retries of earlier ticks, because the new tick does their work (promise R2)."""
    with database.using(MAIN):
        ending = TickRow.update(due_at=None).where(earlier & TickRow.holder.is_null() & (TickRow.retries > 0))
        ended: Any = ending.returning(TickRow.tick, TickRow.message_id).tuples().execute()
    for tick, message_id in ended:
        record_failed(worker, tick, message_id, "its attempts could not be recorded; the next tick did its work")


def record_failed(worker: str, tick: datetime, message_id: str, reason: str) -> None:
    """Record a tick that ends as failed in the current ledger, unless an attempt has a row there."""
    row = {"outcome": "failed", "reason": reason, "message_id": message_id}
    runs.record_tick(worker, tick, row, unless_any=True)


def remember(worker: str, tick: datetime) -> None:
    """Store the tick without sending it, so that the worker's schedule begins with the next one."""
    with database.using(MAIN), database.atomic():
        _store(worker, tick, None)


def _store(worker: str, tick: datetime, due_at: Any) -> None:
    """Store the tick, and delete earlier ones that have ended."""
    TickRow.delete().where((TickRow.worker == worker) & (TickRow.tick < tick) & TickRow.due_at.is_null()).execute()
    given = {"worker": worker, "tick": tick, "message_id": message_id_of(worker, tick), "due_at": due_at}
    TickRow.insert(**given).on_conflict_ignore().execute()


def forget_removed(workers: Collection[str]) -> None:
    """Delete ticks that have been due for 30 days and are not of these workers, such as of one that was removed."""
    with database.using(MAIN):
        other = TickRow.worker != fn.ALL(Value(list(workers), converter=False, unpack=False))
        TickRow.delete().where(other & (TickRow.due_at < NOW - _FORGOTTEN_AFTER)).execute()


def take(holder: str, workers: Collection[str], most: int, running: Collection[str] = ()) -> list[TakenTick]:
    """Take due ticks for a process, the longest waiting first. It keeps them as long as it sends heartbeats.

    Parameters:
      running: Messages that the process runs. If it has another tick, the answer to an earlier call was lost.
    """
    with database.using(MAIN), database.atomic():
        known = TickRow.worker == fn.ANY(Value(list(workers), converter=False, unpack=False))
        due: Any = (
            TickRow.select(TickRow.worker, TickRow.tick)
            .where(((TickRow.due_at <= NOW) | (TickRow.holder == holder)) & known)
            .where(TickRow.message_id.not_in(list(running)))
            .order_by(TickRow.due_at)
            .limit(most)
            .for_update("FOR UPDATE SKIP LOCKED")  # type: ignore[arg-type]
        )
        return [tick for each in due.tuples() for tick in _take(holder, *each)]


def _take(holder: str, worker: str, tick: datetime) -> Iterable[TakenTick]:
    taking = TickRow.update(holder=holder, due_at=NOW + SILENCE, attempts=TickRow.attempts + 1)
    taken: Any = taking.where((TickRow.worker == worker) & (TickRow.tick == tick)).returning(
        TickRow.worker, TickRow.tick, TickRow.message_id, TickRow.retries
    )
    return (TakenTick(*row) for row in taken.tuples().execute())


def end(holder: str, taken: TakenTick, again_in: timedelta | None, *, failed: bool) -> None:
    """End a tick, or let it run again after a delay. Does nothing if another process has taken it."""
    own = (TickRow.worker == taken.worker) & (TickRow.tick == taken.tick) & (TickRow.holder == holder)
    due_at = None if again_in is None else NOW + again_in
    with database.using(MAIN), database.atomic():
        TickRow.update(holder=None, due_at=due_at, retries=taken.retries + failed).where(own).execute()


def was_sent(worker: str, tick: datetime) -> bool | None:
    """Return whether the tick was sent; None if it is older than all stored ticks."""
    with database.using(MAIN):
        rows: Any = TickRow.select(TickRow.tick).where(TickRow.worker == worker).tuples()
        known = [at for (at,) in rows]
    return tick in known if known and tick >= min(known) else None


def queue_lengths(queues: Mapping[str, str]) -> dict[str, QueueLengths]:
    """Return how many ticks of each queue wait or run, and how many wait for a retry.

    Parameters:
      queues: Worker -> its queue.
    """
    waits = TickRow.holder.is_null() & (TickRow.due_at <= NOW)
    is_delayed = TickRow.holder.is_null() & (TickRow.due_at > NOW)
    found = {queue: QueueLengths(0, 0, 0) for queue in sorted(set(queues.values()))}
    with database.using(MAIN), translate_postgres_errors():
        numbers = fn.COUNT(SQL("*")).filter(~is_delayed), fn.COUNT(SQL("*")).filter(is_delayed)
        rows: Any = TickRow.select(TickRow.worker, *numbers, fn.MIN(TickRow.due_at).filter(waits))
        rows = rows.where(TickRow.due_at.is_null(False) & TickRow.worker.in_(list(queues))).group_by(TickRow.worker)
        for worker, waiting, delayed, oldest_at in rows.tuples():
            seen = found[queues[worker]]
            oldest = min((each for each in (seen.oldest_at, oldest_at) if each is not None), default=None)
            found[queues[worker]] = QueueLengths(seen.waiting + waiting, seen.delayed + delayed, 0, oldest)
    return found


def message_id_of(worker: str, tick: datetime) -> str:
    """Return the id of a tick's message, the same for each of its runs."""
    return str(uuid5(NAMESPACE_URL, f"{TickRow._meta.schema}:ticks:{worker}:{int(tick.timestamp())}"))
