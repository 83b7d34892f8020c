"""Declaration of the lease that the runs of a sweep need."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from housekeeping.sweeps.checks.field_types import check_types


@dataclass(frozen=True, slots=True)
class LeaseConfig:
    """Exclusive lease that a run needs.

    Attributes:
      key: Name of the lease. Sweeps and actors with the same key exclude each other. A function is called with the
        argument of the run.
      ttl: Time after which the lease of a dead holder expires. A living holder renews it.
    """

    key: str | Callable[[Any], str]
    ttl: timedelta

    def __post_init__(self) -> None:
        check_types("LeaseConfig", self)

    def key_for(self, argument: Any) -> str:
        """Return the key of the lease for a run with this argument."""
        return self.key(argument) if callable(self.key) else self.key
