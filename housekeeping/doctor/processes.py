"""Check that workers and a scheduler are alive."""

from __future__ import annotations

from collections.abc import Iterator

from housekeeping.brokers.queues import queue_lengths
from housekeeping.core.errors import SchemaMissing
from housekeeping.core.redis_client import redis_client
from housekeeping.core.settings import Settings
from housekeeping.database.clock_skew import database_now
from housekeeping.sweeps.declaration import Sweep
from housekeeping.sweeps.insight.diagnostics import Finding
from housekeeping.sweeps.ledger import runs, schema
from housekeeping.sweeps.processes.alerts import NO_SCHEDULER, process_alerts
from housekeeping.sweeps.processes.heartbeats import read_processes


def examine(settings: Settings, sweeps: dict[str, Sweep]) -> Iterator[Finding]:
    """Yield a warning for each alert about processes, with the texts of ``housekeeping status``."""
    try:
        schema.require()
    except SchemaMissing:
        return  # the PostgreSQL check reports it
    now = database_now()
    processes = read_processes(redis_client(settings.require_redis_url()), settings.namespace, now)
    lengths = queue_lengths(settings, sorted({sweep.queue for sweep in sweeps.values()}))
    waiting = {name: each.waiting for name, each in lengths.items()}
    ever_ran = runs.any_by_a_worker_process()
    alerts = process_alerts(sweeps.values(), processes, waiting, now, settings.timezone, ever_ran=ever_ran)
    for alert in alerts:
        yield Finding("warning", "processes", "scheduler" if alert.name == NO_SCHEDULER else "worker", str(alert))
    if not alerts and processes.known:
        alive = [f"{each.said.kind} {each.name}" for each in processes.listed if each.alive]
        yield Finding("fine", "processes", "heartbeats", ", ".join(alive) or "no queue needs a worker")
