"""Rows of ticks in the run ledger. Each change is one transaction, which locks the ticks of its worker."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any, Final

from peewee import fn

from housekeeping.core.cron import Cron
from housekeeping.database.connection import database
from housekeeping.sweeps.ledger import run_start
from housekeeping.sweeps.ledger.models import Run

#: Reason of missed ticks.
NO_SCHEDULER: Final = "no_scheduler"
_MAX_COUNTED: Final = 600_000  # missed ticks of one gap: more than a year of minutes, counted within a second
MINUTE: Final = timedelta(minutes=1)


def write_missed(worker: str, cron: Cron, after: datetime, last: datetime) -> int:
    """Record the missed ticks of a gap, without those that another scheduler has recorded; return their number."""
    with database.atomic():
        _lock_ticks(worker)
        # Ticks in the ledger are counted already, by a scheduler that died after it recorded this gap or a part of it.
        known = last_tick(worker, last + MINUTE)
        missed = cron.count(max(after, known or after), last, _MAX_COUNTED)
        if not missed:
            return 0
        run_start.record(
            worker,
            "missed",
            NO_SCHEDULER,
            message_id=None,
            tick=last,
            trigger="schedule",
            counts={"missed": missed},
        )
    return missed


def no_longer_missed(worker: str, tick: datetime) -> None:
    """Subtract a tick from the missed ticks it was counted among."""
    with database.atomic():
        _lock_ticks(worker)
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


def write_once(worker: str, tick: datetime, row: dict[str, Any], *, unless_any: bool) -> None:
    """Record an outcome once. With `unless_any`, record it only if its message has no row for this tick."""
    with database.atomic():
        _lock_ticks(worker)
        there = (Run.worker == worker) & (Run.tick == tick) & (Run.message_id == row["message_id"])
        if not unless_any:
            there &= Run.outcome == row["outcome"]
        if not Run.select(Run.id).where(there).exists():
            run_start.record(worker, **row, tick=tick, trigger="schedule")


def _lock_ticks(worker: str) -> None:
    """Lock a worker's ticks until the end of the transaction."""
    database.execute_sql("SELECT pg_advisory_xact_lock(hashtextextended(%s, 0))", (f"housekeeping ticks {worker}",))


def last_tick(worker: str, before: datetime) -> datetime | None:
    """Return the worker's last tick in the current ledger before a time; None without one."""
    last: datetime | None = Run.select(fn.MAX(Run.tick)).where((Run.worker == worker) & (Run.tick < before)).scalar()
    return last
