"""Metric of dropped duplicates, in every kind of process (D2)."""

from __future__ import annotations

import socket
import subprocess
import sys
import urllib.request
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import dramatiq
import pytest
from dramatiq.brokers.redis import RedisBroker

from housekeeping import enqueue_many
from tests.acceptance.processes import WORKER, eventually, started
from tests.integration.middleware.applications import queued
from tests.integration.middleware.deduplication.deduplicated import declared, executed, keys
from tests.integration.middleware.step_worker import StepWorker
from tests.internals.core import metrics

PATIENCE_S: Final = 30
ExportTo = Callable[[metrics.Exporter], None]
_APPLICATION: Final = """
import dramatiq
from dramatiq.middleware.prometheus import Prometheus
from housekeeping import install
from housekeeping.brokers import message_broker
from housekeeping.core.settings import Settings

settings = Settings.load()
broker = message_broker(settings)
broker.add_middleware(Prometheus())
install(broker, settings, workers=False)
dramatiq.set_broker(broker)

@dramatiq.actor(idempotent=True)
def work(number): ...

@dramatiq.actor(queue_name="asked")
def ask():
    work.send(2), work.send(2), work.send(2)

@dramatiq.actor(queue_name="never_worked_off", idempotent=True)
def early(): ...
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


def application(folder: Path, more: str = "") -> Path:
    module = folder / "deduplicating_application.py"
    module.write_text(_APPLICATION + more)
    return module


@pytest.mark.slow
def test_plain_sender_exports_its_dropped_duplicates(
    environment: dict[str, str], tmp_path: Path, redis_client: Any
) -> None:
    # D2: such as a web application with its own metrics page
    module = application(tmp_path, "import prometheus_client\nwork.send(1), work.send(1), work.send(1)\n")
    environment.pop("PROMETHEUS_MULTIPROC_DIR", None)

    sender = [
        sys.executable,
        "-c",
        f"exec(open({str(module)!r}).read())\nprint(prometheus_client.generate_latest().decode())",
    ]
    said = subprocess.run(sender, env=environment, capture_output=True, text=True, timeout=PATIENCE_S)

    assert 'housekeeping_deduplicated_total{worker="work"} 2.0' in said.stdout, said.stderr


@pytest.mark.slow
def test_dramatiqs_metrics_page_shows_drops_of_all_worker_processes(
    environment: dict[str, str], tmp_path: Path, broker: RedisBroker
) -> None:
    # D2
    application(tmp_path, "early.send(), early.send()\nassert 'prometheus_client' not in __import__('sys').modules\n")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    own = {
        "dramatiq_prom_host": "127.0.0.1",
        "dramatiq_prom_port": str(port),
        "dramatiq_prom_db": str(tmp_path / "shared"),
        "PYTHONPATH": str(tmp_path),
    }
    arguments = [*WORKER, "deduplicating_application:broker", "--processes", "1", "--threads", "1", "-Q", "asked"]

    with started(arguments, environment | own, tmp_path / "log") as process:
        ask(broker)
        eventually(shown(port, 'housekeeping_deduplicated_total{worker="work"} 2.0'), process)
        eventually(shown(port, 'dramatiq_messages_total{actor_name="ask",queue_name="asked"} 1.0'), process)


def ask(broker: RedisBroker) -> None:
    dramatiq.actor(broker=broker, actor_name="ask", queue_name="asked")(lambda: None).send()


def shown(port: int, line: str) -> Callable[[], bool]:
    def look() -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=5) as page:
                return line in page.read().decode()
        except OSError:
            return False

    return look
