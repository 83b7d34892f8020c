"""Checks of the servers: PostgreSQL with its outbox, Redis, and the broker with its queues and processes."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any, Final

import redis
from dramatiq.brokers.redis import RedisBroker

from housekeeping.brokers import QueueLengths, message_broker, queue_lengths
from housekeeping.core.clock import SYSTEM_CLOCK, ClockSkew
from housekeeping.core.errors import SchemaMissing, SettingsError
from housekeeping.core.logs import counted, error_line
from housekeeping.core.redis import read_redis_clock, redis_client, translate_redis_errors
from housekeeping.core.settings import Settings
from housekeeping.core.urls import NO_CLUSTER, is_sentinel_url
from housekeeping.database.catalog import quoted_name
from housekeeping.database.connection import database, translate_postgres_errors
from housekeeping.database.queries import database_now
from housekeeping.engine.alerts import NO_SCHEDULER, process_alerts
from housekeeping.ledger import history, schema
from housekeeping.ledger.outbox import OVERDUE
from housekeeping.ledger.processes import PostgresHeartbeats, heartbeat_store, read_processes
from housekeeping.ledger.schema import OutboxRow
from housekeeping.sweeps.declaration import Sweep
from housekeeping.sweeps.values import Finding, Level


def examine_broker(settings: Settings, sweeps: dict[str, Sweep]) -> Iterator[Finding]:
    """Yield findings about the connection, the defaults and dead letters."""
    lengths = queue_lengths(settings, sorted({sweep.queue for sweep in sweeps.values()}))
    queues = ", ".join(f"{name} {each.waiting:,} waiting" for name, each in lengths.items())
    yield Finding("fine", "broker", "connection", queues or "no queues")
    yield _defaults(settings)
    for name, each in lengths.items():
        if each.dead:
            text = f"{counted(each.dead, 'dead letter')} in queue {name}"
            yield Finding("warning", "broker", "dead letters", text, "housekeeping deadletters list")
    if settings.database_url is not None and settings.redis_url is not None:
        yield from _processes(settings, sweeps, lengths)


def _defaults(settings: Settings) -> Finding:
    broker = message_broker(settings)
    if not isinstance(broker, RedisBroker):
        nodes = len((settings.broker_url or "").split(";"))
        if nodes > 1 and settings.rabbitmq_queue_type == "classic":
            text = f"{nodes} nodes, but each classic queue is on one of them and away with it"
            return Finding("warning", "broker", "queues", text, "set HOUSEKEEPING_RABBITMQ_QUEUE_TYPE=quorum")
        text = f"RabbitMQ: confirmed sends to {settings.rabbitmq_queue_type} queues, one prefetched message per thread"
        if nodes > 1:
            text += f"; {nodes} nodes, of which a minority may fail"
        return Finding("fine", "broker", "defaults", text)
    requeue_s, kept_days = broker.heartbeat_timeout // 1000, broker.dead_message_ttl // 86_400_000
    kept = counted(kept_days, "day")
    text = f"a killed worker's messages are requeued after {requeue_s} s, dead letters are kept for {kept}"
    return Finding("fine", "broker", "defaults", text)


def examine_alone(settings: Settings, sweeps: dict[str, Sweep]) -> Iterator[Finding]:
    """Yield findings about an installation without Redis."""
    text = "not configured: leases, ticks and heartbeats are in the database; housekeeping serve runs the workers"
    yield Finding("fine", "redis", "connection", text)
    yield from _processes(settings, sweeps, {})


def _processes(settings: Settings, sweeps: dict[str, Sweep], lengths: dict[str, QueueLengths]) -> Iterator[Finding]:
    """Yield a warning for each alert about processes, with the texts of ``housekeeping status``."""
    try:
        schema.require()
    except SchemaMissing:
        return  # the PostgreSQL check reports it
    now = database_now()
    store = heartbeat_store(settings)
    if not isinstance(store, PostgresHeartbeats):
        beside = [each.name for each in read_processes(PostgresHeartbeats(), now).schedulers if each.alive]
        if beside:
            text = (
                f"{', '.join(beside)} runs without Redis: it sends the same ticks, and its leases do not exclude runs "
                "of workers that use Redis"
            )
            way_out = "stop that housekeeping serve, or all workers and schedulers that have HOUSEKEEPING_REDIS_URL"
            yield Finding("error", "processes", "serve", text, way_out)
    processes = read_processes(store, now)
    waiting = {name: each.waiting for name, each in lengths.items()}
    ever_ran = history.any_by_a_worker_process()
    alerts = process_alerts(sweeps.values(), processes, waiting, now, settings.timezone, ever_ran=ever_ran)
    for alert in alerts:
        yield Finding("warning", "processes", "scheduler" if alert.name == NO_SCHEDULER else "worker", str(alert))
    if not alerts and processes.known:
        alive = [f"{each.heartbeat.kind} {each.name}" for each in processes.listed if each.alive]
        yield Finding("fine", "processes", "heartbeats", ", ".join(alive) or "no queue needs a worker")


#: What `version()` of other servers contains that speak PostgreSQL's protocol.
_OTHERS: Final = {"CockroachDB": "CockroachDB", "YugabyteDB": "YugabyteDB", "-YB-": "YugabyteDB"}
OLDEST_POSTGRES: Final = 130000  # PostgreSQL 13, the oldest tested version
#: VACUUM cannot remove rows that were deleted after the oldest open transaction started.
LONG: Final = timedelta(minutes=10)
_SHOWN: Final = 5  # transactions
_NTP: Final = "synchronize both by NTP"
#: A row with this many attempts has waited for half an hour.
_MANY: Final = 6
_EXAMINED_ROWS: Final = 10_000  # rows of the outbox, the oldest ones

_SUMMARY: Final = """
SELECT event, subscription,
    count(*) FILTER (WHERE due_at < clock_timestamp() - %s),
    count(*) FILTER (WHERE attempts >= %s), max(attempts), max(error) FILTER (WHERE attempts >= %s)
FROM (SELECT * FROM {table} ORDER BY id LIMIT %s) AS first GROUP BY event, subscription ORDER BY 1, 2
"""


def examine_postgres(settings: Settings, sweeps: dict[str, Sweep]) -> Iterator[Finding]:
    """Yield findings about the connection, schema, clock, session settings and long transactions."""
    with translate_postgres_errors():
        other = other_server()
    if other is not None:
        yield Finding("error", "postgres", "server", other, "use PostgreSQL 13 or later")
        return
    with translate_postgres_errors():
        before = SYSTEM_CLOCK.now()
        version, number, in_recovery, read_only, at, user = _row(
            "SELECT current_setting('server_version'), current_setting('server_version_num')::int, "
            "pg_is_in_recovery(), current_setting('default_transaction_read_only'), clock_timestamp(), current_user"
        )
        skew = ClockSkew.between(before, at, SYSTEM_CLOCK.now())
    yield Finding("fine", "postgres", "connection", f"PostgreSQL {version} as {user}")
    if database.prepared() is None:
        text = "transaction mode: limits are sent with each transaction, and no statements are prepared"
        yield Finding("fine", "postgres", "pooler", text)
    if number < OLDEST_POSTGRES:
        yield Finding(
            "warning", "postgres", "version", f"{version} is older than 13", "upgrade; 13 and later are tested"
        )
    if in_recovery or read_only == "on":
        what = "a replica" if in_recovery else "read-only"
        yield Finding("error", "postgres", "writing", f"this server is {what}", "use the URL of the primary")
    yield from _failover()
    yield from _schema()
    yield from _clock(skew)
    yield from _session()
    yield from _long_transactions()


def _failover() -> Iterator[Finding]:
    parameters = database.connect_params
    hosts = len(str(parameters.get("host", "")).split(","))
    if hosts > 1 and parameters.get("target_session_attrs") not in ("read-write", "primary"):
        text = f"the URL has {hosts} hosts, and a session may reach one that is only a replica"
        yield Finding("warning", "postgres", "failover", text, "add target_session_attrs=read-write to the URL")
    elif hosts > 1:
        yield Finding("fine", "postgres", "failover", f"{hosts} hosts; sessions use the one that accepts writes")
    replicas, names = _row(
        "SELECT (SELECT count(*) FROM pg_stat_replication), current_setting('synchronous_standby_names')"
    )
    if replicas:
        loss = "loses nothing" if names else "may undo the last batches, which the next run repeats"
        text = f"{counted(replicas, 'replica')} ({'synchronous' if names else 'asynchronous'}): a failover {loss}"
        yield Finding("fine", "postgres", "replication", text)


def other_server() -> str | None:
    """Return why the server cannot be used although it speaks PostgreSQL's protocol; None for PostgreSQL.

    Raises:
      peewee.PeeweeException: If the server cannot be read.
    """
    (version,) = _row("SELECT version()")
    name = next((name for mark, name in _OTHERS.items() if mark in version), None)
    if name is None:
        return None
    return f"this server is {name}: it lacks catalogs, locks and system columns of PostgreSQL that the batches need"


def _schema() -> Iterator[Finding]:
    try:
        schema.require()
    except SchemaMissing as missing:
        yield Finding("error", "postgres", "schema", str(missing), "housekeeping init")
    else:
        yield Finding("fine", "postgres", "schema", "the library's own tables are up to date")


def _clock(skew: ClockSkew) -> Iterator[Finding]:
    if skew.refused:
        yield Finding("error", "postgres", "clock", f"no run starts on this machine: {skew}", _NTP)
    elif skew.exceeded:
        yield Finding("warning", "postgres", "clock", str(skew), _NTP)
    else:
        yield Finding("fine", "postgres", "clock", "within 5 s of this machine's")


def _session() -> Iterator[Finding]:
    names = ("statement_timeout", "lock_timeout", "idle_in_transaction_session_timeout", "TimeZone")
    values = dict(zip(names, _row(f"SELECT {', '.join(f'current_setting({n!r})' for n in names)}"), strict=True))
    off = [name for name in names[:3] if values[name] == "0"]
    if off:
        text = f"{', '.join(off)} off: a statement that hangs blocks a thread for good"
        yield Finding(
            "warning",
            "postgres",
            "timeouts",
            text,
            "remove it from the URL's options; defaults: 30 s, 10 s, 60 s",
        )
    else:
        yield Finding("fine", "postgres", "timeouts", ", ".join(f"{name} {values[name]}" for name in names[:3]))
    if values["TimeZone"] not in ("UTC", "Etc/UTC"):
        text = f"sessions use {values['TimeZone']}: times without time zone would be read in it"
        yield Finding("warning", "postgres", "time zone", text, "remove TimeZone from the URL's options")


def _long_transactions() -> Iterator[Finding]:
    rows = database.execute_sql(
        "SELECT pid, coalesce(usename, '?'), coalesce(nullif(application_name, ''), '?'), "
        "extract(epoch FROM clock_timestamp() - xact_start)::int FROM pg_stat_activity "
        "WHERE backend_type = 'client backend' AND xact_start < clock_timestamp() - %s "
        "AND pid <> pg_backend_pid() ORDER BY xact_start LIMIT %s",
        (LONG, _SHOWN),
    ).fetchall()
    for pid, user, application, seconds in rows:
        text = f"{application} ({user}, process {pid}) has had a transaction open for {seconds // 60} min"
        yield Finding(
            "warning",
            "postgres",
            "long transactions",
            text,
            f"VACUUM cannot remove newer deleted rows until it ends; to end it: SELECT pg_terminate_backend({pid})",
        )
    if not rows:
        yield Finding("fine", "postgres", "long transactions", "none over 10 min")


def _row(sql: str) -> Any:
    return database.execute_sql(sql).fetchone()


def outbox(settings: Settings, sweeps: dict[str, Sweep]) -> Iterator[Finding]:
    """Yield findings about the oldest rows of the outbox. Handlers are in other processes and cannot be examined."""
    table = quoted_name(OutboxRow)
    if database.execute_sql("SELECT to_regclass(%s)", (table,)).fetchone()[0] is None:
        return  # another check reports the missing schema
    summaries = database.execute_sql(_SUMMARY.format(table=table), (OVERDUE, _MANY, _MANY, _EXAMINED_ROWS)).fetchall()
    healthy = True
    for event, name, overdue, failing, attempts, error in summaries:
        if overdue:
            healthy = False
            yield Finding(
                "error",
                "postgres",
                "outbox",
                f"{counted(overdue, 'row')} of {event}: no process delivers to the subscription {name!r}",
                "import the module with its events.on(...) where housekeeping.outbox runs; if the handler was removed, "
                f"delete its rows from {table}",
            )
        elif failing:
            healthy = False
            yield Finding(
                "warning",
                "postgres",
                "outbox",
                f"{counted(failing, 'row')} of {event} could not be delivered to {name!r} for "
                f"{counted(attempts, 'time')}: {error}",
                "repair the handler; each row is retried once an hour",
            )
    if healthy:
        yield Finding("fine", "postgres", "outbox", "no overdue rows")


OLDEST_REDIS: Final = (6, 0)
_FEWEST_SENTINELS: Final = 3
_EXAMINED_KEYS: Final = 1000  # keys among which those of other applications are counted
_SHARED: Final = "pending_direct_uploads"  # the one key outside of the namespace; docs/workers/object_storage.md


def examine_redis(settings: Settings, sweeps: dict[str, Sweep]) -> Iterator[Finding]:
    """Yield findings about the connection, version, Sentinel, eviction, persistence, other users and clock."""
    client = redis_client(settings.require_redis_url())
    with translate_redis_errors():
        skew = read_redis_clock(client)
        info: dict[str, Any] = _any(client.info())
    if info.get("cluster_enabled"):
        raise SettingsError(f"this Redis is a node of a Redis Cluster, and {NO_CLUSTER}")
    version = str(info.get("valkey_version") or info.get("redis_version") or "?")
    name = "Valkey" if "valkey_version" in info else "Redis"
    yield Finding("fine", "redis", "connection", f"{name} {version}")
    if _numbers(version) < OLDEST_REDIS:
        yield Finding("error", "redis", "version", f"{version} is older than 6", "upgrade; 6 and later are tested")
    if is_sentinel_url(settings.require_redis_url()):
        yield from _sentinel(client, info)
    yield from _memory(client, info)
    yield from _persistence(info)
    yield from _other_users(client, settings.namespace)
    if skew.exceeded:
        # Only the times of uploads are compared with it.
        level: Level = "error" if skew.refused and settings.object_stores else "warning"
        yield Finding(level, "redis", "clock", str(skew), "synchronize both by NTP")


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
    elif limit and info.get("used_memory", 0) >= limit:
        text = "maxmemory is used up: Redis rejects writes, so that no message and no heartbeat can be sent"
        yield Finding("error", "redis", "memory", text, "raise maxmemory, or remove keys that are not needed")
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
        for key in client.scan_iter(count=_EXAMINED_KEYS):
            seen += 1
            others += not key.startswith(f"{namespace}:".encode()) and key != _SHARED.encode()
            if seen >= _EXAMINED_KEYS:
                break
    if others:
        belong = "belongs" if others == 1 else "belong"
        text = f"{others} of {counted(seen, 'key')} {belong} to other applications: their FLUSHDB would delete all"
        yield Finding("warning", "redis", "company", text, "use a separate database or server")


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2] if part.isdigit())


def _any(value: Any) -> Any:
    return value
