"""The Dramatiq actor of a sweep."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import dramatiq
from dramatiq import Actor, Broker

from housekeeping.foundation.steering import PutBack
from housekeeping.sweeps.declaration import MAX_RETRIES, Sweep
from housekeeping.sweeps.run import perform


def register(broker: Broker, sweep: Sweep) -> Actor[[], None]:
    """Declare the sweep's actor on `broker`, which must have the library's middleware."""
    schedule: dict[str, Any] = {"schedule": sweep.schedule} if sweep.schedule and sweep.enabled else {}

    @dramatiq.actor(
        broker=broker,
        actor_name=sweep.name,
        queue_name=sweep.queue,
        max_retries=MAX_RETRIES,
        # Twice the budget and a minute: the run stops itself long before; this ends one that hangs.
        time_limit=int((2 * sweep.max_runtime + timedelta(minutes=1)).total_seconds() * 1000),
        idempotent=True,
        feature_category=sweep.feature_category,
        data_consistency=sweep.data_consistency,
        sweep=sweep,
        **schedule,
    )
    def run() -> None:
        result = perform(sweep)
        result.raise_for_failure()
        if (result.outcome, result.reason) == ("partial", "shutdown"):
            raise PutBack(f"{sweep.name} stopped for the shutdown of its process")

    return run
