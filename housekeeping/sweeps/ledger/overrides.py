"""What operators have said of workers for a while: paused, or narrowed to smaller steps."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Literal

from peewee import EXCLUDED

from housekeeping.database.connection import database
from housekeeping.sweeps.ledger.models import NOW, Switch, SwitchChange

SwitchState = Literal["paused", "narrow"]


@dataclass(frozen=True, slots=True)
class Override:
    """What is in force for a worker.

    Attributes:
      state: ``paused``: no run begins, and one at work stops after its batch. ``narrow``: with smaller limits.
      until: When it ends by itself; null: when somebody ends it.
      said_by: Who said it, as the command line or the page knew it.
      batch_size, max_runtime: The smaller limits; null: the worker's own.
    """

    worker: str
    state: SwitchState
    reason: str | None = None
    until: datetime | None = None
    since: datetime | None = None
    said_by: str | None = None
    batch_size: int | None = None
    max_runtime: timedelta | None = None

    def as_json(self) -> dict[str, Any]:
        """As programs read it; moments as ISO 8601."""
        return {
            "state": self.state,
            "reason": self.reason,
            "until": self.until.isoformat() if self.until else None,
            "since": self.since.isoformat() if self.since else None,
            "said_by": self.said_by,
            "batch_size": self.batch_size,
            "max_runtime_s": self.max_runtime.total_seconds() if self.max_runtime else None,
        }


def overrides() -> dict[str, Override]:
    """What is in force now, by worker; a switch whose end has come is over."""
    return {row.worker: _read(row) for row in Switch.select().where(_lasts())}


def override_of(worker: str) -> Override | None:
    """What is in force for one worker."""
    row = Switch.select().where((Switch.worker == worker) & _lasts()).first()
    return None if row is None else _read(row)


def switch(to: Override) -> None:
    """Put this in force, in place of what was; recorded among the changes in the same transaction."""
    values: dict[str, Any] = {
        "worker": to.worker,
        "state": to.state,
        "reason": to.reason,
        "until": to.until,
        "said_by": to.said_by,
        "batch_size": to.batch_size,
        "max_runtime_s": to.max_runtime.total_seconds() if to.max_runtime else None,
    }
    with database.atomic():
        replaced: Any = {getattr(Switch, name): getattr(EXCLUDED, name) for name in values if name != "worker"}
        Switch.insert(**values, since=NOW).on_conflict(
            conflict_target=[Switch.worker], update={**replaced, Switch.since: NOW}
        ).execute()
        SwitchChange.insert(**values, at=NOW).execute()


def resume(worker: str, said_by: str | None = None) -> bool:
    """End what is in force; False when nothing was. Recorded as `switch` does."""
    with database.atomic():
        there = Switch.delete().where((Switch.worker == worker) & _lasts()).execute()
        if there:
            SwitchChange.insert(worker=worker, state="on", said_by=said_by, at=NOW).execute()
    return bool(there)


def _lasts() -> Any:
    return Switch.until.is_null() | (Switch.until > NOW)


def _read(row: Any) -> Override:
    return Override(
        row.worker,
        row.state,
        row.reason,
        row.until,
        row.since,
        row.said_by,
        row.batch_size,
        None if row.max_runtime_s is None else timedelta(seconds=row.max_runtime_s),
    )
