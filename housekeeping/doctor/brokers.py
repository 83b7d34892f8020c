"""Check of the broker, its queues, its dead letters, and the processes that serve them."""

from __future__ import annotations

from collections.abc import Iterator

from dramatiq.brokers.redis import RedisBroker

from housekeeping.brokers import message_broker
from housekeeping.brokers.queues import QueueLengths, queue_lengths
from housekeeping.core.errors import SchemaMissing
from housekeeping.core.redis.client import redis_client
from housekeeping.core.settings import Settings
from housekeeping.core.wording import counted
from housekeeping.database.clock_skew import database_now
from housekeeping.sweeps.declaration import Sweep
from housekeeping.sweeps.ledger import run_queries, schema
from housekeeping.sweeps.processes.alerts import NO_SCHEDULER, process_alerts
from housekeeping.sweeps.processes.heartbeats import read_processes
from housekeeping.sweeps.registry import Finding


def examine(settings: Settings, sweeps: dict[str, Sweep]) -> Iterator[Finding]:
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


def _processes(settings: Settings, sweeps: dict[str, Sweep], lengths: dict[str, QueueLengths]) -> Iterator[Finding]:
    """Yield a warning for each alert about processes, with the texts of ``housekeeping status``."""
    try:
        schema.require()
    except SchemaMissing:
        return  # the PostgreSQL check reports it
    now = database_now()
    processes = read_processes(redis_client(settings.require_redis_url()), settings.namespace, now)
    waiting = {name: each.waiting for name, each in lengths.items()}
    ever_ran = run_queries.any_by_a_worker_process()
    alerts = process_alerts(sweeps.values(), processes, waiting, now, settings.timezone, ever_ran=ever_ran)
    for alert in alerts:
        yield Finding("warning", "processes", "scheduler" if alert.name == NO_SCHEDULER else "worker", str(alert))
    if not alerts and processes.known:
        alive = [f"{each.heartbeat.kind} {each.name}" for each in processes.listed if each.alive]
        yield Finding("fine", "processes", "heartbeats", ", ".join(alive) or "no queue needs a worker")
