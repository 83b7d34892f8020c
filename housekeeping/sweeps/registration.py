"""Dramatiq actors of sweeps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Final

import dramatiq
from dramatiq import Actor, Broker

from housekeeping.core.errors import RunTakenOver
from housekeeping.core.middleware_errors import Requeue
from housekeeping.core.telemetry import metrics
from housekeeping.database.connection import database
from housekeeping.sweeps import actor_registry
from housekeeping.sweeps.declaration import Sweep
from housekeeping.sweeps.engine.results import RunResult
from housekeeping.sweeps.engine.runner import run_sweep
from housekeeping.sweeps.ledger.runs import HEARTBEAT
from housekeeping.sweeps.sharding import shards_of

#: Sidekiq's default, which every design document refers to (リトライ仕様).
MAX_RETRIES: Final = 25


def register(broker: Broker, sweep: Sweep) -> Actor[..., None]:
    """Declare the sweep's actor on `broker`, which must have the library's middleware.

    Each further shard of a sweep has an actor of its own, to which the sweep's actor sends a message first.
    """
    shards = [_declare(broker, shard, name, _actor_function(shard)) for name, shard in shards_of(sweep)]
    schedule: dict[str, Any] = {"schedule": sweep.schedule} if sweep.schedule and sweep.enabled else {}
    actor = _declare(broker, sweep, sweep.name, _actor_function(sweep, shards), **schedule)
    actor_registry.remember(actor)
    if database.several():
        metrics.WORKER_DATABASE.set(1, sweep.name, sweep.database)
    return actor


def _actor_function(sweep: Sweep, shards: Sequence[Actor[..., None]] = ()) -> Callable[..., None]:
    def without_argument() -> None:
        for shard in shards:
            shard.send_with_options(trigger="parent")
        _raise_for_retry(sweep, run_sweep(sweep))

    def with_argument(argument: Any) -> None:
        _raise_for_retry(sweep, run_sweep(sweep, argument))

    return without_argument if sweep.argument_name is None else with_argument


def _raise_for_retry(sweep: Sweep, result: RunResult) -> None:
    """Raise if the message is to be delivered again: the run's error, or Requeue."""
    result.raise_for_failure()
    if isinstance(result.error, RunTakenOver):
        if sweep.argument_name is not None:
            raise result.error  # the run that took over may have another argument
        # The run that took over may still be killed. To end the message here would record its work as done.
        raise Requeue(f"{sweep.name} was taken over", HEARTBEAT)
    if result.retry_after is not None:
        raise Requeue(f"{sweep.name} waits for the lease of its own dead attempt", result.retry_after)
    if (result.outcome, result.reason) == ("partial", "shutdown"):
        raise Requeue(f"{sweep.name} stopped for the shutdown of its process")


def _declare(
    broker: Broker, sweep: Sweep, name: str, function: Callable[..., None], **schedule: Any
) -> Actor[..., None]:
    decorator: Any = dramatiq.actor(
        broker=broker,
        actor_name=name,
        queue_name=sweep.queue,
        max_retries=MAX_RETRIES,
        # A run stops by itself long before. This ends a run that hangs.
        time_limit=int((2 * sweep.max_runtime + timedelta(minutes=1)).total_seconds() * 1000),
        idempotent=True,
        feature_category=sweep.feature_category,
        data_consistency=sweep.data_consistency,
        rediscovered=sweep.rediscovered,
        sweep=sweep,
        **schedule,
        **sweep.actor_options,
    )
    actor: Actor[..., None] = decorator(function)
    return actor
