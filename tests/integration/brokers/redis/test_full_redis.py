"""A Redis that has reached its ``maxmemory``: workers go on, and free the memory of the queues."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import dramatiq
import pytest
import redis
from dramatiq.middleware import MiddlewareError

from housekeeping import Settings
from tests.integration.middleware.applications import close_all, eventually, installed, queued, working
from tests.internals.embedded import embedded
from tests.internals.leases import RedisLeaseStore

LEASE = {"key": "work", "ttl": timedelta(minutes=1), "if_held": "retry"}
GUARDED = {"idempotent": True, "deduplicate": "until_executed", "exclusive_lease": LEASE}


@pytest.mark.parametrize("options", [{}, GUARDED])
def test_worker_processes_the_messages_that_fill_redis(settings: Settings, options: dict[str, Any]) -> None:
    ran: list[int] = []
    with embedded.start(postgres=False) as servers, redis.Redis.from_url(servers.redis_url) as administrator:
        broker = installed(settings.model_copy(update={"redis_url": servers.redis_url, "database_url": None}))

        @dramatiq.actor(broker=broker, max_retries=0, **options)
        def work(number: int) -> None:
            ran.append(number)
            assert number

        for number in range(5):
            work.send(number)
        administrator.config_set("maxmemory", 1)
        with pytest.raises((redis.OutOfMemoryError, MiddlewareError), match="maxmemory"):
            work.send(5)
        with working(broker):
            eventually(lambda: not queued(broker))

        assert (sorted(ran), len(queued(broker, "default.XQ"))) == ([0, 1, 2, 3, 4], 1)
        close_all()


def test_running_mark_is_renewed_on_a_full_redis() -> None:
    with embedded.start(postgres=False) as servers, redis.Redis.from_url(servers.redis_url) as client:
        marks = RedisLeaseStore(client, kind="running")
        marks.obtain("work", "token", timedelta(seconds=3))
        client.config_set("maxmemory", 1)

        assert marks.obtain("work", "token", timedelta(hours=1)) == "token"
        assert (marks.remaining("work") or timedelta()) > timedelta(minutes=1)
