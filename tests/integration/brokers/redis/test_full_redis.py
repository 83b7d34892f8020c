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


@pytest.mark.parametrize("options", [{}, GUARDED])
def test_retries_due_messages_and_followers_pass_a_full_redis(  # R4
    settings: Settings, options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    ran: list[str] = []
    with embedded.start(postgres=False) as servers, redis.Redis.from_url(servers.redis_url) as administrator:
        broker = installed(settings.model_copy(update={"redis_url": servers.redis_url, "database_url": None}))

        @dramatiq.actor(broker=broker, min_backoff=1, max_backoff=1, **options)
        def work(text: str) -> None:
            ran.append(text)
            if ran.count(text) == 1:
                raise ValueError("once")

        @dramatiq.actor(broker=broker)
        def follow(text: Any, *results: object) -> None:
            ran.append(text if isinstance(text, str) else "callback")

        work.send("retried")
        work.send_with_options(args=("due",), delay=1)
        work.send_with_options(args=("called",), on_success=follow)
        dramatiq.pipeline([work.message("piped"), follow.message("next")], broker=broker).run()
        administrator.config_set("maxmemory", 1)
        with working(broker):
            eventually(lambda: not queued(broker) and not queued(broker, "default.DQ"))

        expected = ["retried", "due", "called", "piped"]
        assert sorted(each for each in ran if each in expected) == sorted(2 * expected)
        assert {"callback", "next"} < set(ran)
        assert not [each for each in caplog.records if each.levelname == "CRITICAL"]
        close_all()


def test_running_mark_is_renewed_on_a_full_redis() -> None:
    with embedded.start(postgres=False) as servers, redis.Redis.from_url(servers.redis_url) as client:
        marks = RedisLeaseStore(client, kind="running")
        marks.obtain("work", "token", timedelta(seconds=3))
        client.config_set("maxmemory", 1)

        assert marks.obtain("work", "token", timedelta(hours=1)) == "token"
        assert (marks.remaining("work") or timedelta()) > timedelta(minutes=1)
