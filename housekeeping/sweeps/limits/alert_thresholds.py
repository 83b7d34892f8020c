"""Alert thresholds of a sweep."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from housekeeping.core.errors import DeclarationError
from housekeeping.sweeps.checks.field_types import check_types


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
