"""Spans, read with OpenTelemetry's in-memory exporter."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from typing import Any

import dramatiq
import pytest
import redis
from dramatiq.brokers.redis import RedisBroker
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from housekeeping import Settings
from tests.integration.conftest import AddStatuses
from tests.integration.middleware.applications import close_all, installed, queued
from tests.integration.middleware.step_worker import StepWorker
from tests.internals.brokers import Skip
from tests.internals.core import OPTION, HousekeepingError
from tests.internals.database import Database
from tests.internals.engine import register
from tests.internals.workers import STATUS_SWEEPS as SWEEPS

Spans = Callable[[], list[ReadableSpan]]


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> Iterator[Spans]:
    """Return the ended spans of a process with tracing."""
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    # Not as the global provider: OpenTelemetry accepts only one for the life of the process.
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: provider)
    yield lambda: list(exporter.get_finished_spans())
    provider.shutdown()


@pytest.fixture
def broker(settings: Settings, redis_client: redis.Redis) -> Iterator[RedisBroker]:
    yield installed(settings.model_copy(update={"database_url": None}))
    close_all()


def parent(span: ReadableSpan) -> int | None:
    return span.parent.span_id if span.parent else None


def test_span_of_a_run_is_a_child_of_its_senders(broker: RedisBroker, spans: Spans) -> None:
    @dramatiq.actor(broker=broker)
    def work() -> None: ...

    with trace.get_tracer_provider().get_tracer("application").start_as_current_span("request") as request:
        message = work.send()
    StepWorker(broker).run()

    sender, run = spans()
    assert run.context is not None and sender.context is not None
    assert (run.name, run.kind) == ("work", trace.SpanKind.CONSUMER)
    assert parent(run) == request.get_span_context().span_id
    assert run.context.trace_id == sender.context.trace_id
    assert run.attributes is not None
    assert run.attributes["messaging.message.id"] == message.message_id


def test_span_of_a_sent_message_is_a_child_of_its_run(broker: RedisBroker, spans: Spans) -> None:
    @dramatiq.actor(broker=broker)
    def child() -> None: ...

    @dramatiq.actor(broker=broker)
    def work() -> None:
        child.send()

    work.send()
    step_worker = StepWorker(broker)
    step_worker.run(), step_worker.run()

    first, second = spans()
    assert first.context is not None
    assert (second.name, parent(second)) == ("child", first.context.span_id)


def test_failed_run_has_an_error_span_and_its_retry_the_same_trace(broker: RedisBroker, spans: Spans) -> None:
    @dramatiq.actor(broker=broker, max_retries=1)
    def work() -> None:
        raise HousekeepingError("no")

    with trace.get_tracer_provider().get_tracer("application").start_as_current_span("request"):
        work.send()
    step_worker = StepWorker(broker)
    step_worker.run()
    step_worker.come_due()
    step_worker.run()

    sender, first, retry = spans()
    assert first.context is not None and retry.context is not None and retry.attributes is not None
    assert (first.status.status_code, first.status.description) == (trace.StatusCode.ERROR, "HousekeepingError")
    assert retry.context.trace_id == first.context.trace_id
    assert sender.context is not None
    assert [parent(first), parent(retry)] == [sender.context.span_id] * 2
    assert retry.attributes["housekeeping.retries"] == 1


def test_skipped_message_ends_its_span(broker: RedisBroker, spans: Spans) -> None:
    class Refuses(dramatiq.Middleware):
        def before_process_message(self, broker: Any, message: Any) -> None:
            raise Skip("not today")

    broker.add_middleware(Refuses())

    @dramatiq.actor(broker=broker)
    def work() -> None: ...

    work.send()
    StepWorker(broker).run()

    [skipped] = spans()
    assert skipped.attributes is not None
    assert skipped.attributes["housekeeping.skipped"] == "not today"
    assert not trace.get_current_span().get_span_context().is_valid


def test_each_batch_of_a_sweep_has_a_span_below_its_run(
    settings: Settings, redis_client: redis.Redis, postgres: Database, add_statuses: AddStatuses, spans: Spans
) -> None:
    add_statuses(150, "now() - interval '1 hour'")
    broker = installed(settings)
    register(broker, SWEEPS[0]).send()
    StepWorker(broker, "cronjob").run()
    close_all()

    *batches, run = spans()
    assert run.context is not None
    assert [(each.name, parent(each)) for each in batches] == [("housekeeping.batch", run.context.span_id)] * 2


def test_process_without_tracing_sends_no_trace_context(
    broker: RedisBroker, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in [name for name in sys.modules if name.startswith("opentelemetry")]:
        monkeypatch.setitem(sys.modules, name, None)

    @dramatiq.actor(broker=broker)
    def work() -> None: ...

    work.send()
    [message] = queued(broker)
    StepWorker(broker).run()

    assert OPTION not in message.options
    assert queued(broker) == []
    assert [record.message for record in caplog.records if record.levelname in ("ERROR", "CRITICAL")] == []


def test_trace_context_is_not_part_of_the_deduplication_key(broker: RedisBroker, spans: Spans) -> None:
    @dramatiq.actor(broker=broker, idempotent=True)
    def work() -> None: ...

    tracer = trace.get_tracer_provider().get_tracer("application")
    with tracer.start_as_current_span("one"):
        work.send()
    with tracer.start_as_current_span("other"):
        work.send()

    [message] = queued(broker)
    assert json.dumps(message.options[OPTION])
