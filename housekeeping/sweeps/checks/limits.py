"""Checks of a declaration's numbers, times and schedule."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Final

from housekeeping.core.cron import Cron
from housekeeping.core.errors import DeclarationError
from housekeeping.leases.renewal import SHORTEST_TTL

if TYPE_CHECKING:
    from housekeeping.sweeps.declaration import Sweep

#: A time so long ago cannot be subtracted from every date.
_LONGEST_AGE: Final = timedelta(days=36_525)
#: Counts that the engine adds to a run.
_RESERVED: Final = ("breaker", "clock_skew_s", "confirmed", "predicate", "throttled", "unconfirmed")


def check_limits(sweep: Sweep) -> None:
    """Reject limits that cannot work, or not together."""
    name = sweep.name
    if reserved := [count for count in sweep.counts if count in _RESERVED]:
        raise DeclarationError(f"{name}: the engine itself counts {reserved[0]!r}; give this count another name")
    if sweep.batch_size < 1 or sweep.max_runtime <= timedelta():
        raise DeclarationError(f"{name}: batch_size must be at least 1 and max_runtime longer than nothing")
    if sweep.max_rows_per_s is not None and sweep.max_rows_per_s <= 0:
        raise DeclarationError(f"{name}: max_rows_per_s must be above 0, or None for no limit")
    if sweep.rest < 0:
        raise DeclarationError(f"{name}: rest must be 0 or more; 1 pauses as long as a batch takes")
    if sweep.stale_after is not None and sweep.stale_after <= timedelta():
        raise DeclarationError(
            f"{name}: stale_after is {sweep.stale_after!r}, so rows that are not old yet would be stale; write "
            "how old a row must be, such as timedelta(days=14), or None"
        )
    if sweep.stale_after is not None and sweep.stale_after > _LONGEST_AGE:
        raise DeclarationError(
            f"{name}: stale_after is {sweep.stale_after.days:,} days, over 100 years, so no row is ever stale; "
            "write how old a row must be, such as timedelta(days=14)"
        )
    if sweep.shards < 1 or (sweep.shards > 1 and not sweep.divisible):
        raise DeclarationError(f"{name}: shards must be 1; only a sweep of tables without an argument can have more")
    if sweep.lease is not None:
        if sweep.lease.ttl < SHORTEST_TTL:
            raise DeclarationError(f"{name}: the lease's ttl must be at least 3 seconds")
        if sweep.max_runtime >= sweep.lease.ttl:
            raise DeclarationError(f"{name}: max_runtime must be below the lease's ttl ({sweep.lease.ttl})")
    if sweep.schedule is not None:
        if sweep.argument_name is not None:
            raise DeclarationError(f"{name} takes an argument ({sweep.argument_name}), so it has no schedule")
        Cron(sweep.schedule)
