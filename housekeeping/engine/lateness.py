"""Alert `late`: stale rows that stay for longer than their sweep promises, whatever the outcome of its runs."""

from __future__ import annotations

from datetime import UTC, date, datetime, time, timedelta
from typing import Any, Final

from housekeeping.core.logs import format_duration
from housekeeping.database.connection import LOCK_TIME, STATEMENT_TIME, time_limit
from housekeeping.engine.guard import reads_time
from housekeeping.ledger.alerts import Alert
from housekeeping.sweeps.declaration import Sweep
from housekeeping.sweeps.keyset import ExceptHeld
from housekeeping.sweeps.partitions import PartitionStage
from housekeeping.sweeps.stage import Stage
from housekeeping.sweeps.table_stage import TableStage

LATE: Final = "late"
#: Interval at which the rows are read again while no run ends.
INTERVAL: Final = timedelta(minutes=5)
#: Worker -> its promise and the end of its last run, when its rows were read, and the alert.
_read: Final[dict[str, tuple[tuple[timedelta | None, datetime], datetime, Alert | None]]] = {}


def late_limit(sweep: Sweep) -> timedelta | None:
    """Return the age from which a row is late; None if the sweep promises no age."""
    promised = sweep.alerts.late
    return None if promised is None else promised + (sweep.stale_after or timedelta())


def late_alert(sweep: Sweep, now: datetime) -> Alert | None:
    """Return the alert about stale rows older than promised, without those on hold; None if there are none.

    Raises:
      peewee.PeeweeException, Exception: The rows cannot be read, or a predicate fails.
    """
    promised, limit = sweep.alerts.late, late_limit(sweep)
    if promised is None or limit is None:
        return None
    late, times = False, list[datetime]()
    for stage in sweep.stages_for_run():
        if not stage.backlog(now - promised, 1).rows:
            continue
        since, is_late = _as_time(stage.oldest(now - promised)), _reads_time(stage)
        if since is None and not is_late:
            return unknown_age(sweep, f"stage {stage.name} is not ordered by a time, and `stale` does not use its time")
        # If `stale` does not use the time, the age is that of the order column.
        if is_late or (since is not None and since <= now - promised):
            late = True
            times += [] if since is None else [since]
    if not late:
        return None
    text, value = f"rows stay stale for over {format_duration(promised.total_seconds())}", None
    if times:
        age_s = (now - min(times)).total_seconds()
        text += f"; the oldest one is from {min(times):%Y-%m-%d %H:%M:%S} UTC, {format_duration(age_s)} ago"
        value = age_s if age_s > limit.total_seconds() else None
    return Alert(LATE, text, limit.total_seconds(), value)


def known_late_alert(sweep: Sweep, ended_at: datetime | None, now: datetime) -> Alert | None:
    """Return `late_alert` from a cache: it is read again after each run and every five minutes, in limited time.

    Parameters:
      ended_at: When the worker's last run ended; None without one.
    """
    if sweep.alerts.late is None:
        return None
    key, known = (sweep.alerts.late, ended_at or now), _read.get(sweep.name)
    is_old = known is None or known[0] != key or not timedelta() <= now - known[1] < INTERVAL
    if known is None or is_old or ended_at is None:
        with time_limit(STATEMENT_TIME, LOCK_TIME):
            known = _read[sweep.name] = key, now, late_alert(sweep, now)
    return known[2]


def unknown_age(sweep: Sweep, why: str) -> Alert:
    """Return the alert of a sweep whose oldest stale row has an unknown age."""
    limit = late_limit(sweep) or timedelta()
    return Alert(LATE, f"the age of the oldest stale row cannot be read: {why}", limit.total_seconds())


def _reads_time(stage: Stage) -> bool:
    """Return whether the stale condition of a stage depends on the time."""
    if not isinstance(stage, TableStage):
        return isinstance(stage, PartitionStage)
    return reads_time(stage.stale.stale if isinstance(stage.stale, ExceptHeld) else stage.stale)


def _as_time(value: Any) -> datetime | None:
    if isinstance(value, datetime):
        return value if value.tzinfo else value.replace(tzinfo=UTC)
    return datetime.combine(value, time(), UTC) if isinstance(value, date) else None
