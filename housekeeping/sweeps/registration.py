"""The Dramatiq actor of a sweep."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import dramatiq
from dramatiq import Actor, Broker

from housekeeping.core.errors import RunTakenOver
from housekeeping.core.middleware_errors import Requeue
from housekeeping.sweeps import actor_registry
from housekeeping.sweeps.declaration import MAX_RETRIES, Sweep
from housekeeping.sweeps.engine.runner import run_sweep
from housekeeping.sweeps.ledger.runs import HEARTBEAT
from housekeeping.sweeps.sharding import shards_of


def register(broker: Broker, sweep: Sweep) -> Actor[..., None]:
    """Declare the sweep's actor on `broker`, which must have the library's middleware.

    Of a sweep in parts, each part has an actor of its own beside it, which the sweep's own sends first.
    """
    others = [_declared(broker, shard, name, _run(shard)) for name, shard in shards_of(sweep)]
    run = _run(sweep)

    def without_argument() -> None:
        for other in others:
            other.send_with_options(trigger="parent")
        run()

    def with_argument(argument: Any) -> None:
        run(argument)

    function = without_argument if sweep.argument_name is None else with_argument
    schedule: dict[str, Any] = {"schedule": sweep.schedule} if sweep.schedule and sweep.enabled else {}
    actor = _declared(broker, sweep, sweep.name, function, **schedule)
    actor_registry.remember(actor)
    return actor


def _run(sweep: Sweep) -> Callable[..., None]:
    def run(*argument: Any) -> None:
        result = run_sweep(sweep, *argument)
        result.raise_for_failure()
        if isinstance(result.error, RunTakenOver) and sweep.argument_name is not None:
            raise result.error  # who took over may be about something else
        if isinstance(result.error, RunTakenOver):
            # Who took over may still be killed: to end here would record the message's work as done.
            raise Requeue(f"{sweep.name} was taken over", HEARTBEAT)
        if result.again_after is not None:
            raise Requeue(f"{sweep.name} waits for the lease of its own dead attempt", result.again_after)
        if (result.outcome, result.reason) == ("partial", "shutdown"):
            raise Requeue(f"{sweep.name} stopped for the shutdown of its process")

    return run


def _declared(
    broker: Broker, sweep: Sweep, name: str, function: Callable[..., None], **schedule: Any
) -> Actor[..., None]:
    declare: Any = dramatiq.actor(
        broker=broker,
        actor_name=name,
        queue_name=sweep.queue,
        max_retries=MAX_RETRIES,
        # Twice the budget and a minute: the run stops itself long before; this ends one that hangs.
        time_limit=int((2 * sweep.max_runtime + timedelta(minutes=1)).total_seconds() * 1000),
        idempotent=True,
        feature_category=sweep.feature_category,
        data_consistency=sweep.data_consistency,
        rediscovered=sweep.rediscovered,
        sweep=sweep,
        **schedule,
        **sweep.actor_options,
    )
    actor: Actor[..., None] = declare(function)
    return actor
