"""Actor of the bulk-enqueue tests and helpers that read its keys."""

from __future__ import annotations

from typing import Any

import dramatiq
from dramatiq import Broker
from dramatiq.brokers.redis import RedisBroker

from housekeeping import Settings


def actor_of(broker: Broker, **options: Any) -> dramatiq.Actor[..., None]:
    @dramatiq.actor(broker=broker, actor_name="work", idempotent=True, **options)
    def work(number: Any) -> None: ...

    return work


def keys(broker: RedisBroker, settings: Settings) -> dict[bytes, int]:
    """Return the deduplication keys with their remaining milliseconds."""
    found = broker.client.scan_iter(match=f"{settings.namespace}:dedup:*")
    return {key: broker.client.pttl(key) for key in found}
