"""Check of the Redis server: version, Sentinel, eviction, persistence, other users, clock."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any, Final

import redis

from housekeeping.core.clock import SYSTEM_CLOCK
from housekeeping.core.errors import SettingsError
from housekeeping.core.redis.client import redis_client, translate_redis_errors
from housekeeping.core.redis.sentinel_url import NO_CLUSTER, is_sentinel_url
from housekeeping.core.sanitize import error_line
from housekeeping.core.settings import Settings
from housekeeping.core.wording import counted
from housekeeping.database.clock_skew import ClockSkew
from housekeeping.sweeps.declaration import Sweep
from housekeeping.sweeps.registry import Finding

OLDEST: Final = (6, 0)
_FEWEST_SENTINELS: Final = 3
_EXAMINED: Final = 1000  # keys
_SHARED: Final = "pending_direct_uploads"  # the one key outside of the namespace; docs/workers/object_storage.md


def examine(settings: Settings, sweeps: dict[str, Sweep]) -> Iterator[Finding]:
    """Yield findings about the connection, version, Sentinel, eviction, persistence, other users and clock."""
    client = redis_client(settings.require_redis_url())
    with translate_redis_errors():
        before = SYSTEM_CLOCK.now()
        seconds, micro = _any(client.time())
        after = SYSTEM_CLOCK.now()
        info: dict[str, Any] = _any(client.info())
    if info.get("cluster_enabled"):
        raise SettingsError(f"this Redis is a node of a Redis Cluster, and {NO_CLUSTER}")
    version = str(info.get("valkey_version") or info.get("redis_version") or "?")
    name = "Valkey" if "valkey_version" in info else "Redis"
    yield Finding("fine", "redis", "connection", f"{name} {version}")
    if _numbers(version) < OLDEST:
        yield Finding("error", "redis", "version", f"{version} is older than 6", "upgrade; 6 and later are tested")
    if is_sentinel_url(settings.require_redis_url()):
        yield from _sentinel(client, info)
    yield from _memory(client, info)
    yield from _persistence(info)
    yield from _other_users(client, settings.namespace)
    at = datetime.fromtimestamp(seconds + micro / 1_000_000, UTC)
    skew = ClockSkew.between(before, at, after)
    if skew.exceeded:
        text = f"this machine and Redis are {abs(skew.seconds):,.1f} s apart"
        yield Finding("warning", "redis", "clock", text, "synchronize both by NTP")


def _sentinel(client: redis.Redis, info: dict[str, Any]) -> Iterator[Finding]:
    """Yield what the Sentinels say about the service, and what a failover needs."""
    pool = _any(client.connection_pool)
    known, usable, silent = list[dict[str, Any]](), list[int](), list[str]()
    for sentinel in pool.sentinel_manager.sentinels:
        try:
            known.append(_any(sentinel.sentinel_master(pool.service_name)))
            each_replica = _any(sentinel.sentinel_slaves(pool.service_name))
            usable.append(sum(not (each["is_sdown"] or each["is_disconnected"]) for each in each_replica))
        except redis.RedisError as error:
            silent.append(error_line(error))
    number = len(known) + len(silent)
    all_known = max((each["num-other-sentinels"] + 1 for each in known), default=0)
    connected = int(info.get("connected_slaves", 0))
    # Any Sentinel may lead a failover. Sentinels learn of a new replica within ten seconds.
    replicas = min([connected, *usable])
    host, port = pool.master_address
    text = (
        f"service {pool.service_name}, primary {host}:{port}, {counted(replicas, 'replica')}, {len(known)} of {number}"
    )
    yield Finding("fine", "redis", "sentinel", f"{text} Sentinels answer; a failover may lose the last writes")
    for why in silent:
        yield Finding(
            "warning", "redis", "sentinel", f"a Sentinel does not answer: {why}", "start it, or correct the URL"
        )
    if 0 < all_known < _FEWEST_SENTINELS:
        text = f"{counted(all_known, 'Sentinel')}: without a majority of them there is no failover"
        yield Finding("warning", "redis", "sentinel", text, "run three, on different machines")
    if connected and not replicas:
        text = "a Sentinel does not know a replica that is up: no failover is possible"
        yield Finding("warning", "redis", "sentinel", text, "repeat the command after ten seconds")
    elif not replicas:
        text = "the primary has no replica: no failover is possible"
        yield Finding("warning", "redis", "sentinel", text, "start one: replicaof in its configuration")
    elif connected > 1 and "min_slaves_good_slaves" not in info:
        text = "a primary that is cut off from the others accepts messages that the failover discards"
        yield Finding("warning", "redis", "sentinel", text, "CONFIG SET min-replicas-to-write 1")


def _memory(client: redis.Redis, info: dict[str, Any]) -> Iterator[Finding]:
    limit, policy = info.get("maxmemory", 0), str(info.get("maxmemory_policy", "?"))
    if limit and policy != "noeviction":
        text = f"when memory is full, Redis evicts keys ({policy}), including messages and leases"
        yield Finding("error", "redis", "eviction", text, "CONFIG SET maxmemory-policy noeviction")
    elif limit and info.get("used_memory", 0) > 0.9 * limit:
        yield Finding("warning", "redis", "memory", "over 90 % is used: enqueueing will fail soon", "raise maxmemory")
    else:
        yield Finding("fine", "redis", "eviction", f"{policy}, {'no limit' if not limit else 'with a limit'}")


def _persistence(info: dict[str, Any]) -> Iterator[Finding]:
    if info.get("aof_enabled"):
        yield Finding("fine", "redis", "persistence", "append-only file")
    else:
        text = "snapshots at most: messages enqueued after the last one are lost with the server"
        yield Finding("warning", "redis", "persistence", text, "CONFIG SET appendonly yes")


def _other_users(client: redis.Redis, namespace: str) -> Iterator[Finding]:
    with translate_redis_errors():
        others, seen = 0, 0
        for key in client.scan_iter(count=_EXAMINED):
            seen += 1
            others += not key.startswith(f"{namespace}:".encode()) and key != _SHARED.encode()
            if seen >= _EXAMINED:
                break
    if others:
        belong = "belongs" if others == 1 else "belong"
        text = f"{others} of {counted(seen, 'key')} {belong} to other applications: their FLUSHDB would delete all"
        yield Finding("warning", "redis", "company", text, "use a separate database or server")


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2] if part.isdigit())


def _any(value: Any) -> Any:
    return value
