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
from dramatiq.middleware import MiddlewareError
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from housekeeping import Settings, enqueue_many
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


def attributes(span: ReadableSpan) -> dict[str, Any]:
    return {name: value for name, value in (span.attributes or {}).items() if name.startswith(("messaging.", "error."))}


def test_span_of_a_run_is_below_that_of_its_sending_and_linked_to_it(broker: RedisBroker, spans: Spans) -> None:
    @dramatiq.actor(broker=broker, queue_name="mails")
    def work() -> None: ...

    with trace.get_tracer_provider().get_tracer("application").start_as_current_span("request") as request:
        message = work.send()
    StepWorker(broker, "mails").run()

    sending, sender, run = spans()
    assert run.context is not None and sender.context is not None and sending.context is not None
    assert [(each.name, each.kind) for each in (sending, run)] == [
        ("send mails", trace.SpanKind.PRODUCER),
        ("process mails", trace.SpanKind.CONSUMER),
    ]
    assert (parent(sending), parent(run)) == (request.get_span_context().span_id, sending.context.span_id)
    assert [link.context.span_id for link in run.links] == [sending.context.span_id]
    assert run.context.trace_id == sender.context.trace_id
    for span, operation in ((sending, "send"), (run, "process")):
        assert attributes(span) == {
            "messaging.system": "dramatiq",
            "messaging.operation.name": operation,
            "messaging.operation.type": operation,
            "messaging.destination.name": "mails",
            "messaging.message.id": message.message_id,
        }


def test_many_messages_have_one_span_of_their_sending(broker: RedisBroker, spans: Spans) -> None:
    @dramatiq.actor(broker=broker)
    def work(number: int) -> None: ...

    enqueue_many(work, range(3))
    step_worker = StepWorker(broker)
    for _ in range(3):
        step_worker.run()

    sending, *runs = spans()
    assert sending.context is not None and sending.attributes is not None
    assert sending.attributes["messaging.batch.message_count"] == 3
    assert [each.links[0].context.span_id for each in runs] == [sending.context.span_id] * 3


def test_message_that_cannot_be_sent_has_an_error_span(broker: RedisBroker, spans: Spans) -> None:
    class Refuses(dramatiq.Middleware):
        def before_enqueue(self, broker: Any, message: Any, delay: Any) -> None:
            raise MiddlewareError("no")

    broker.add_middleware(Refuses())

    @dramatiq.actor(broker=broker)
    def work() -> None: ...

    with pytest.raises(MiddlewareError):
        work.send()

    [sending] = spans()
    assert sending.status.status_code == trace.StatusCode.ERROR
    assert attributes(sending)["error.type"] == "MiddlewareError"


def test_span_of_a_sent_message_is_a_child_of_its_run(broker: RedisBroker, spans: Spans) -> None:
    @dramatiq.actor(broker=broker)
    def child() -> None: ...

    @dramatiq.actor(broker=broker)
    def work() -> None:
        child.send()

    work.send()
    step_worker = StepWorker(broker)
    step_worker.run(), step_worker.run()

    _, sending, first, second = spans()
    assert first.context is not None and sending.context is not None and second.attributes is not None
    assert (sending.name, parent(sending)) == ("send default", first.context.span_id)
    assert (second.attributes["housekeeping.worker"], parent(second)) == ("child", sending.context.span_id)


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

    sending, _, first, retry = spans()  # a retry has no other span of its sending
    assert first.context is not None and retry.context is not None and retry.attributes is not None
    assert (first.status.status_code, first.status.description) == (trace.StatusCode.ERROR, "HousekeepingError")
    assert retry.context.trace_id == first.context.trace_id
    assert sending.context is not None
    assert [parent(first), parent(retry)] == [sending.context.span_id] * 2
    assert attributes(first)["error.type"] == "HousekeepingError"
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

    _, skipped = spans()
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

    _, *batches, run = spans()
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
