"""Limits that a sweep declares: its breaker, its throttle and its alert thresholds. Other modules apply them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Literal

from housekeeping.core.errors import DeclarationError
from housekeeping.sweeps.checks.field_types import check_types

Action = Literal["alert", "limit", "stop"]


@dataclass(frozen=True, slots=True)
class Breaker:
    """Limit on the rows of one run, and the action when more are stale.

    Attributes:
      times_history: Allow this many times the most rows that a past run processed, and at least 10,000. Applies after
        ten runs. None for no such limit.
      share: Allow this share of the sweep's tables, by PostgreSQL's statistics: 0.5 is half. Applies from the first
        run. None for no such limit.
      action: ``alert``: the run continues and raises an alert. ``limit``: the run processes the allowed number of rows,
        ends as ``partial: breaker`` and raises an alert; the next run resumes. ``stop``: the run ends as
        ``failed: breaker`` before the first change.

    Raises:
      DeclarationError: The action is unknown.
    """

    times_history: float | None = 100
    share: float | None = None
    action: Action = "alert"

    def __post_init__(self) -> None:
        check_types("Breaker", self)


@dataclass(frozen=True, slots=True)
class ThrottleLimits:
    """Health of the database above which a run is throttled. None or False disables a check.

    Attributes:
      replication_lag_s: Seconds that a standby lags. 30: a healthy one lags under a second, and readers notice half
        a minute.
      waiting_locks: Sessions that wait for locks on the sweep's tables. 10: single ones are normal under load. Ten of
        them mean a migration or a hot row, which the run would delay.
      vacuum: Whether a vacuum of the tables throttles. Off, because every cleanup is followed by one.
      batch_s: Average seconds of the run's batches since the last check. Off, because it differs by table.
      wait_s: How long a run waits before its first batch, and how long it then continues slowly before it ends. It
        always processes one batch.
      wal_mb_per_s: Megabytes of WAL that the whole server writes per second. Off, because it differs by server.
      slot_lag_mb: Megabytes of WAL that the server keeps for the slowest replication slot. Off, because it differs by
        server.
      custom: Returns None, or the reason to wait as text. Called at most every two seconds, outside of transactions.
    """

    replication_lag_s: float | None = 30
    waiting_locks: int | None = 10
    vacuum: bool = False
    batch_s: float | None = None
    wait_s: float = 10
    wal_mb_per_s: float | None = None
    slot_lag_mb: float | None = None
    custom: Callable[[], str | None] | None = None

    def __post_init__(self) -> None:
        check_types("ThrottleLimits", self)

    @property
    def queries_database(self) -> bool:
        """Whether any check queries the database."""
        return self.replication_lag_s is not None or self.waiting_locks is not None or self.vacuum

    @property
    def queries_wal(self) -> bool:
        """Whether any check queries the server's WAL."""
        return self.wal_mb_per_s is not None or self.slot_lag_mb is not None


@dataclass(frozen=True, slots=True)
class AlertThresholds:
    """Limits above which a sweep raises an alert; None disables one.

    Attributes:
      longest_run: Duration of a run.
      backlog: Stale rows left after a run.
      most: Limits on counts of one run, by the name of the count.
      failed_runs: Failed runs in a row.
      overdue: Periods of the schedule without a run.
    """

    longest_run: timedelta | None = None
    backlog: int | None = None
    most: Mapping[str, int] = field(default_factory=dict)
    failed_runs: int | None = None
    # No document has a number: one period may be lost to a restart, two to a restart at the wrong moment.
    overdue: int | None = 3

    def __post_init__(self) -> None:
        check_types("AlertThresholds", self)

    def changed(self, given: Mapping[str, float | None], counts: Sequence[str]) -> AlertThresholds:
        """Return a copy with the limits of the setting ``alarms``.

        Parameters:
          counts: The worker's counts. The limit of a count has the name of the count.

        Raises:
          DeclarationError: There is no such alert, or its limit is not a whole number.
        """
        changes: dict[str, Any] = {"most": dict(self.most)}
        for name, limit in given.items():
            if name == "longest_run_s":
                changes["longest_run"] = None if limit is None else timedelta(seconds=limit)
                continue
            if limit is not None and limit != int(limit):
                raise DeclarationError(f"the alarm {name} is {limit}; it should be a whole number or null")
            number = None if limit is None else int(limit)
            if name in ("backlog", "failed_runs", "overdue"):
                changes[name] = number
            elif name in counts:
                changes["most"].pop(name, None)
                changes["most"] |= {} if number is None else {name: number}
            else:
                known = ", ".join(("longest_run_s", "backlog", "failed_runs", "overdue", *counts))
                raise DeclarationError(f"there is no alarm {name}; the alarms are {known}")
        return dataclasses.replace(self, **changes)
