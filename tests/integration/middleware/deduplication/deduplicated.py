"""A deduplicated actor and helpers that read its keys."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import dramatiq
import redis
from dramatiq import Actor, Broker

from housekeeping import Settings

TTL = timedelta(minutes=10)


def declared(broker: Broker, runs: list[Any], function: Any = None, **options: Any) -> Actor[..., Any]:
    """Declare an idempotent actor that records its argument, then calls the test's function."""

    def work(project_id: int = 0) -> None:
        runs.append(project_id)
        if function is not None:
            function()

    return dramatiq.actor(broker=broker, actor_name="work", **{"idempotent": True, **options})(work)


def executed(**deduplication: Any) -> dict[str, Any]:
    return {"deduplicate": "until_executed", "deduplication": {"ttl": TTL, **deduplication}}


def executing(**deduplication: Any) -> dict[str, Any]:
    return {"deduplicate": "until_executing", "deduplication": {"ttl": TTL, **deduplication}}


def keys(client: redis.Redis, settings: Settings) -> list[bytes]:
    found: list[bytes] = list(client.scan_iter(match=f"{settings.namespace}:dedup:*", count=1000))
    return found


def fail() -> None:
    raise RuntimeError("disk full")
