"""Metrics page as Prometheus reads it, and the processes that serve one."""

from __future__ import annotations

import socket
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from housekeeping.workers.user_status_cleanup.models import UserStatus
from tests.acceptance.processes import WORKER, Process, eventually, started
from tests.internals.database import Database

STATUSES: Final = "user_status_cleanup.batch"
#: An application on the ready-made broker whose actors change the metrics.
_APPLICATION: Final = """
import os
import time
from datetime import timedelta

import dramatiq
from housekeeping import ExclusiveLease
from housekeeping.app import broker
from housekeeping.core.redis import shared_redis
from housekeeping.leases.lease import current_lease

LEASE = {"key": "metered", "ttl": timedelta(minutes=5)}
METERED = {"broker": broker, "queue_name": "metered"}

@dramatiq.actor(**METERED)
def meet():
    # One thread each: both are here at the same time in two processes only.
    place = f"{shared_redis.namespace}:met"
    shared_redis.client.sadd(place, os.getpid())
    while shared_redis.client.scard(place) < 2:
        time.sleep(0.01)

@dramatiq.actor(idempotent=True, **METERED)
def work(number): ...

@dramatiq.actor(**METERED)
def ask():
    for number in (1, 1, 1, 2):
        work.send(number)

@dramatiq.actor(max_retries=1, min_backoff=1, max_backoff=2, **METERED)
def fail():
    raise RuntimeError("as it should")

@dramatiq.actor(exclusive_lease=LEASE, **METERED)
def lose():
    shared_redis.client.delete(f"{shared_redis.namespace}:lease:metered")

@dramatiq.actor(exclusive_lease={**LEASE, "key": "taken"}, **METERED)
def meet_a_held_lease(): ...
"""


@dataclass(frozen=True)
class Page:
    """Samples of a metrics page by name and labels."""

    samples: dict[tuple[str, frozenset[tuple[str, str]]], float]

    def value(self, name: str, **labels: str) -> float | None:
        return self.samples.get((name, frozenset(labels.items())))

    def names(self) -> set[str]:
        return {name for name, _ in self.samples}

    def labels(self, name: str) -> set[str]:
        return {label for each, labels in self.samples if each == name for label, _ in labels}

    def values_of(self, name: str, label: str) -> set[str]:
        return {value for each, labels in self.samples if each == name for key, value in labels if key == label}


def read(port: int) -> Page:
    """Return the page at this local port; raise `OSError` if there is none."""
    from prometheus_client.parser import text_string_to_metric_families

    with urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=10) as page:
        families = list(text_string_to_metric_families(page.read().decode()))
    return Page(
        {(sample.name, frozenset(sample.labels.items())): sample.value for each in families for sample in each.samples}
    )


def shows(port: int, name: str, value: float, **labels: str) -> Callable[[], bool]:
    """Return whether the page at this port shows this value."""

    def look() -> bool:
        try:
            return read(port).value(name, **labels) == value
        except OSError:
            return False

    return look


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


@contextmanager
def metered(environment: dict[str, str], folder: Path) -> Iterator[tuple[Process, int]]:
    """Start two worker processes of the application above with a thread each; yield the port of their page."""
    (folder / "metered_application.py").write_text(_APPLICATION)
    (folder / "shared").mkdir()
    port = free_port()
    own = {"HOUSEKEEPING_METRICS_PORT": str(port), "dramatiq_prom_db": str(folder / "shared")}
    # The library's module is the broker: a process of any other broker keeps its own logging.
    modules = ["housekeeping.app", "metered_application", "--path", str(folder)]
    arguments = [*WORKER, *modules, "-p", "2", "-t", "1", "--skip-logging"]
    with started(arguments, environment | own, folder / "worker") as process:
        eventually(lambda: process.said("Metrics are served"), process)
        yield process, port


def due_statuses(postgres: Database, count: int) -> None:
    """Insert statuses that are due for one minute, two minutes, ..."""
    postgres.create_tables([UserStatus])
    postgres.execute_sql(
        "INSERT INTO user_statuses (user_id, clear_status_at) "
        f"SELECT n, now() - n * interval '1 minute' FROM generate_series(1, {count}) AS n"
    )
