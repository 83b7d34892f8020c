"""Operators' overrides of workers: paused, or narrowed to lower limits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final, Literal

from peewee import EXCLUDED, fn

from housekeeping.core.wording import counted, format_duration
from housekeeping.database.connection import database
from housekeeping.sweeps.ledger.models import NOW, Run, Switch, SwitchChange

SwitchState = Literal["paused", "narrow"]

#: The override of a run's worker, for the statement that writes the run's row: it costs no round trip.
OVERRIDE: Final = Switch.select(fn.JSONB_BUILD_ARRAY(Switch.state, Switch.batch_size, Switch.max_runtime_s)).where(
    (Switch.worker == Run.worker) & (Switch.until.is_null() | (Switch.until > NOW))
)


@dataclass(frozen=True, slots=True)
class Override:
    """The active override of a worker.

    Attributes:
      state: ``paused``: no run begins, and a running one stops after its batch. ``narrow``: lower limits.
      until: When it expires; None if it stays until `resume`.
      said_by: The operator, as known to the command line or the dashboard.
      batch_size: The lower limit; None for the worker's own.
      max_runtime: The lower limit; None for the worker's own.
    """

    worker: str
    state: SwitchState
    reason: str | None = None
    until: datetime | None = None
    since: datetime | None = None
    said_by: str | None = None
    batch_size: int | None = None
    max_runtime: timedelta | None = None

    def columns(self) -> dict[str, Any]:
        """Return the values of the tables' columns, without the worker and the time of the change."""
        return {
            "state": self.state,
            "reason": self.reason,
            "until": self.until,
            "said_by": self.said_by,
            "batch_size": self.batch_size,
            "max_runtime_s": self.max_runtime.total_seconds() if self.max_runtime else None,
        }

    def as_json(self) -> dict[str, Any]:
        """Return the override as JSON values, times as ISO 8601."""
        values = {**self.columns(), "since": self.since}.items()
        return {name: value.isoformat() if isinstance(value, datetime) else value for name, value in values}


def describe_override(override: Override) -> str:
    """Return which override is in force, until when and why."""
    limits = [
        *([f"{counted(override.batch_size, 'record')} a batch"] if override.batch_size else []),
        *([f"{format_duration(override.max_runtime.total_seconds())} a run"] if override.max_runtime else []),
    ]
    state = f"narrowed to {' and '.join(limits)}" if limits else override.state
    ends = f"until {override.until:%Y-%m-%d %H:%M:%S} UTC" if override.until else "until it is resumed"
    return f"{override.worker} is {state} {ends}" + (f": {override.reason}" if override.reason else "")


def override_from(worker: str, values: Sequence[Any] | None) -> Override | None:
    """Return the override that `OVERRIDE` has selected."""
    if values is None:
        return None
    state, batch_size, max_runtime_s = values
    max_runtime = None if max_runtime_s is None else timedelta(seconds=max_runtime_s)
    return Override(worker, state, batch_size=batch_size, max_runtime=max_runtime)


def overrides() -> dict[str, Override]:
    """Return the active overrides by worker."""
    return {row.worker: _read(row) for row in Switch.select().where(_is_active())}


def override_of(worker: str) -> Override | None:
    """Return the active override of a worker; None without one."""
    row = Switch.select().where((Switch.worker == worker) & _is_active()).first()
    return None if row is None else _read(row)


def switch(to: Override) -> None:
    """Replace the worker's override, and record the change in the same transaction."""
    values = {"worker": to.worker, **to.columns()}
    with database.atomic():
        replaced: Any = {getattr(Switch, name): getattr(EXCLUDED, name) for name in values if name != "worker"}
        Switch.insert(**values, since=NOW).on_conflict(
            conflict_target=[Switch.worker], update={**replaced, Switch.since: NOW}
        ).execute()
        SwitchChange.insert(**values, at=NOW).execute()


def resume(worker: str, said_by: str | None = None) -> bool:
    """End the worker's override and record the change; return False if there was none."""
    with database.atomic():
        removed = Switch.delete().where((Switch.worker == worker) & _is_active()).execute()
        if removed:
            SwitchChange.insert(worker=worker, state="on", said_by=said_by, at=NOW).execute()
    return bool(removed)


def _is_active() -> Any:
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
