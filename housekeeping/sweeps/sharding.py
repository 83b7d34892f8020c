"""Shards of a sweep: concurrent runs that share its work.

All shards process rows in the same order, and each takes the next rows that no other has locked. The others skip the
rows of a shard that died; a later run, which begins at the front, processes them.
"""

from __future__ import annotations

import dataclasses

from housekeeping.sweeps.declaration import Sweep
from housekeeping.sweeps.lease_config import LeaseConfig


def shards_of(sweep: Sweep) -> list[tuple[str, Sweep]]:
    """Return the further shards of a sweep by actor name; empty for a sweep that is not sharded.

    If the sweep has a lease, each shard has one of its own, so that two runs of one shard exclude each other.
    """
    return [(f"{sweep.name}.part-{number}", _shard(sweep, number)) for number in range(1, sweep.shards)]


def _shard(sweep: Sweep, number: int) -> Sweep:
    lease = sweep.lease
    if lease is not None:
        lease = LeaseConfig(f"{lease.key_for(None)}:part-{number}", lease.ttl)
    # The sweep's own run does the work before the lease, once for all shards.
    return dataclasses.replace(sweep, lease=lease, before_lease=None)
