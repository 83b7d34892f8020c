"""What a sweep is: what is stale, what is done with it, in which steps, within which limits, when."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final, Literal

from peewee import Expression, Field, Model

from housekeeping.foundation.cron import Cron
from housekeeping.foundation.errors import DeclarationError, SettingsError
from housekeeping.foundation.settings import WorkerSettings
from housekeeping.sweeps.actions import Action

DataConsistency = Literal["always", "sticky", "delayed"]

#: Sidekiq's default, which every design document refers to (リトライ仕様).
MAX_RETRIES: Final = 25


@dataclass(frozen=True, slots=True)
class Alarms:
    """When somebody should look: a run longer than `longest_run`, more than `backlog` rows due."""

    longest_run: timedelta | None = None
    backlog: int | None = None


@dataclass(frozen=True, slots=True)
class LeaseTerms:
    """The exclusive lease a sweep runs under.

    Attributes:
      key: Its name; sweeps and actors that name the same key exclude each other.
      ttl: How long it outlives a holder that died; renewed while the holder lives.
    """

    key: str
    ttl: timedelta


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """One kind of cleaning, as a declaration; the engine runs it.

    ::

        expired = Sweep(
            name="sessions.expired",
            stale=lambda now: Session.expires_at <= now,
            order=(Session.expires_at, Session.id),
            action=Delete(counted_as="deleted_rows"),
            schedule="*/5 * * * *",
        )

    Attributes:
      name: The worker's public name: actor, settings, ledger and logs use it.
      stale: The one predicate, given the time the run began; run, plan and backlog all use it.
      order: The columns the walk follows, ending with the primary key, so that it can go on after any row.
      action: What is done with the stale rows of a batch.
      schedule: A cron expression; none: the sweep runs only when asked.
      batch_size: Rows a statement, and so a transaction.
      max_runtime: How long a run takes new batches; asked after each full batch.
      lease: The exclusive lease a run needs; none: runs may overlap, and skip each other's rows.
      queue: The Dramatiq queue of its actor.
      alarms: When somebody should look.
      feature_category, data_consistency: Recorded as actor options.
    """

    name: str
    stale: Callable[[datetime], Expression]
    order: tuple[Field, ...]
    action: Action
    schedule: str | None = None
    batch_size: int = 100
    max_runtime: timedelta = timedelta(minutes=5)
    lease: LeaseTerms | None = None
    queue: str = "cronjob"
    alarms: Alarms = Alarms()
    feature_category: str = "not_owned"
    data_consistency: DataConsistency = "always"
    enabled: bool = True

    def __post_init__(self) -> None:
        key = self.key
        if tuple(field.name for field in self.order[-len(key) :]) != tuple(field.name for field in key):
            names = ", ".join(field.name for field in key)
            raise DeclarationError(
                f"{self.name}: order must end with the primary key ({names}), or rows could be missed"
            )
        if self.batch_size < 1 or self.max_runtime <= timedelta():
            raise DeclarationError(f"{self.name}: batch_size must be at least 1 and max_runtime longer than nothing")
        if self.lease is not None and self.max_runtime >= self.lease.ttl:
            raise DeclarationError(f"{self.name}: max_runtime must be shorter than the lease's ttl ({self.lease.ttl})")
        if self.schedule is not None:
            Cron(self.schedule)

    @property
    def model(self) -> type[Model]:
        """The table the sweep walks."""
        model: type[Model] = self.order[0].model
        return model

    @property
    def key(self) -> tuple[Field, ...]:
        """The columns that identify a row."""
        meta: Any = self.model._meta
        return tuple(meta.get_primary_keys())

    def configured(self, settings: WorkerSettings) -> Sweep:
        """The same sweep with what the settings say of it.

        Raises:
          SettingsError: When a setting has no use here, or its value cannot work.
        """
        given = {name: getattr(settings, name) for name in settings.model_fields_set}
        changes: dict[str, Any] = {}
        where = f'HOUSEKEEPING_WORKERS["{self.name}"]'
        for name, value in given.items():
            match name:
                case "enabled" | "schedule" | "batch_size":
                    changes[name] = value
                case "max_runtime_s":
                    changes["max_runtime"] = timedelta(seconds=value)
                case "lease_ttl_s" if self.lease is not None:
                    changes["lease"] = dataclasses.replace(self.lease, ttl=timedelta(seconds=value))
                case "table":
                    continue  # the worker's models are bound to their tables before this
                case _:
                    raise SettingsError(f'{where}["{name}"] is {value!r}, but this worker has no use for it')
        try:
            return dataclasses.replace(self, **changes)
        except DeclarationError as error:
            raise SettingsError(f"{where} is {given!r}; {error}") from None
