"""Metric of dropped duplicates, in every kind of process (D2)."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, Final

import dramatiq
import pytest
from dramatiq.brokers.redis import RedisBroker

from housekeeping import enqueue_many
from tests.integration.middleware.applications import queued
from tests.integration.middleware.deduplication.deduplicated import declared, executed, keys
from tests.integration.middleware.step_worker import StepWorker
from tests.internals.core import metrics

PATIENCE_S: Final = 30
ExportTo = Callable[[metrics.Exporter], None]
_APPLICATION: Final = """
import dramatiq
import prometheus_client
from housekeeping import install
from housekeeping.brokers import message_broker
from housekeeping.core.settings import Settings

settings = Settings.load()
broker = message_broker(settings)
install(broker, settings, workers=False)
dramatiq.set_broker(broker)

@dramatiq.actor(idempotent=True)
def work(number): ...
"""


class Counting:
    """Replacement for prometheus-client that counts the duplicates."""

    def __init__(self) -> None:
        self.counted: dict[str, int] = {}
        self.generate_latest = None

    def Counter(self, name: str, *_: object, **__: object) -> SimpleNamespace:
        counts = self.counted if name == "housekeeping_deduplicated_total" else {}

        def labels(worker: str, *_: str) -> SimpleNamespace:
            return SimpleNamespace(inc=lambda number: counts.update({worker: counts.get(worker, 0) + number}))

        return SimpleNamespace(labels=labels)

    def Gauge(self, *_: object, **__: object) -> SimpleNamespace:
        return SimpleNamespace(labels=lambda *_: SimpleNamespace(set=lambda value: None))

    def Histogram(self, *_: object, **__: object) -> SimpleNamespace:
        return SimpleNamespace(labels=lambda *_: SimpleNamespace(observe=lambda seconds: None))


@pytest.fixture
def exported(monkeypatch: pytest.MonkeyPatch, export_to: ExportTo) -> dict[str, int]:
    """Return the counts of a process that exports metrics."""
    counting: Any = Counting()
    monkeypatch.setitem(sys.modules, "prometheus_client", counting)
    export_to(metrics.Exporter())
    counted: dict[str, int] = counting.counted
    return counted


def test_each_dropped_duplicate_is_counted_once_wherever_it_is_dropped(
    broker: RedisBroker, step_worker: StepWorker, exported: dict[str, int], settings: Any, redis_client: Any
) -> None:
    # D2: from `send`, `send_with_options`, groups and bulk; at the due time; and at the start
    work = declared(broker, [], **executed())
    other = dramatiq.actor(broker=broker, actor_name="other", idempotent=True, deduplicate="until_executed")(fail_first)
    work.send(0), work.send(0), work.send_with_options(args=(0,))
    dramatiq.group([work.message(0)], broker=broker).run()
    enqueue_many(work, [0, 1, 1])
    assert exported == {"work": 5}

    delayed = work.send_with_options(args=(0,), delay=60_000)
    step_worker.come_due()
    assert exported == {"work": 6} and delayed.message_id not in [each.message_id for each in queued(broker)]

    redis_client.delete(*keys(redis_client, settings))
    other.send(), work.send(0)
    step_worker.run()
    assert exported == {"work": 7}


def fail_first() -> None:
    raise RuntimeError


def test_failing_metric_fails_no_send(
    broker: RedisBroker, export_to: ExportTo, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    # D2
    def broken(*_: object, **__: object) -> None:
        raise OSError("the folder of shared values is gone")

    monkeypatch.setitem(sys.modules, "prometheus_client", SimpleNamespace(Counter=broken, generate_latest=None))
    export_to(metrics.Exporter())
    work = declared(broker, [])
    work.send()

    messages = [work.send(), work.send()]

    assert all("duplicate_of" in message.options for message in messages)
    assert [record.message for record in caplog.records].count("Metrics are not exported") == 1


@pytest.mark.slow
def test_plain_sender_exports_its_dropped_duplicates(environment: dict[str, str], redis_client: Any) -> None:
    # D2: such as a web application with its own metrics page
    environment.pop("PROMETHEUS_MULTIPROC_DIR", None)
    page = "print(prometheus_client.generate_latest().decode())"

    sender = [sys.executable, "-c", f"{_APPLICATION}\nwork.send(1), work.send(1), work.send(1)\n{page}"]
    said = subprocess.run(sender, env=environment, capture_output=True, text=True, timeout=PATIENCE_S)

    assert 'housekeeping_deduplicated_total{worker="work"} 2.0' in said.stdout, said.stderr
