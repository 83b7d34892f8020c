"""Check of the broker, its queues and dead letters."""

from __future__ import annotations

from collections.abc import Iterator

from dramatiq.brokers.redis import RedisBroker

from housekeeping.brokers import message_broker
from housekeeping.brokers.queues import queue_lengths
from housekeeping.core.settings import Settings
from housekeeping.core.wording import counted
from housekeeping.sweeps.declaration import Sweep
from housekeeping.sweeps.insight.diagnostics import Finding


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


def _defaults(settings: Settings) -> Finding:
    broker = message_broker(settings)
    if not isinstance(broker, RedisBroker):
        return Finding("fine", "broker", "defaults", "RabbitMQ: confirmed sends, one prefetched message per thread")
    requeue_s, kept_days = broker.heartbeat_timeout // 1000, broker.dead_message_ttl // 86_400_000
    text = f"a killed worker's messages are requeued after {requeue_s} s, dead letters are kept for {kept_days} days"
    return Finding("fine", "broker", "defaults", text)
