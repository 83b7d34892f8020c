"""Spans for messages: the span of a run is a child of its sender's span, across processes."""

from __future__ import annotations

import sys
import threading
from typing import Any, Final

from dramatiq import Broker, Message, MessageProxy, Middleware

from housekeeping.core.telemetry.context import tracer, tracing_api

#: The message option with the sender's trace: W3C's ``traceparent`` and ``tracestate``.
OPTION: Final = "trace"


class _ThreadState(threading.local):
    #: The span of the running message, and the token that detaches it.
    span: Any = None
    token: Any = None


class Traces(Middleware):
    """Middleware that gives each run a span of OpenTelemetry, as a child of the span that sent its message.

    Actors need no option. It works in each process that has set up OpenTelemetry, by ``opentelemetry-instrument
    housekeeping worker`` or the application's own provider, and costs nothing in others. A retry belongs to the trace
    of the message's first sender.
    """

    def __init__(self) -> None:
        self._thread = _ThreadState()

    def before_enqueue(self, broker: Broker, message: Message[Any], delay: int | None) -> None:
        if tracing_api() is None or OPTION in message.options:
            return
        from opentelemetry import propagate

        carrier: dict[str, str] = {}
        propagate.inject(carrier)
        if carrier:
            message.options[OPTION] = carrier

    def before_process_message(self, broker: Broker, message: MessageProxy) -> None:
        own_tracer = tracer()
        if own_tracer is None:
            return
        from opentelemetry import context, propagate

        self._end(None)  # an interrupted hook may have left a span
        trace: Any = tracing_api()
        carrier = message.options.get(OPTION)
        sent = propagate.extract(carrier if isinstance(carrier, dict) else {})
        self._thread.span = own_tracer.start_span(
            message.actor_name,
            context=sent,
            kind=trace.SpanKind.CONSUMER,
            attributes={
                "messaging.system": "dramatiq",
                "messaging.operation.type": "process",
                "messaging.destination.name": message.queue_name,
                "messaging.message.id": message.message_id,
                "housekeeping.worker": message.actor_name,
                "housekeeping.retries": int(message.options.get("retries", 0)),
            },
        )
        self._thread.token = context.attach(trace.set_span_in_context(self._thread.span))

    def after_process_message(
        self, broker: Broker, message: MessageProxy, *, result: Any = None, exception: BaseException | None = None
    ) -> None:
        self._end(exception)

    def after_skip_message(self, broker: Broker, message: MessageProxy) -> None:
        # Dramatiq calls this hook while it handles the SkipMessage, and does not pass it on.
        if self._thread.span is not None:
            self._thread.span.set_attribute("housekeeping.skipped", str(sys.exception() or ""))
        self._end(None)

    def _end(self, exception: BaseException | None) -> None:
        span, self._thread.span = self._thread.span, None
        token, self._thread.token = self._thread.token, None
        if span is None:
            return
        from opentelemetry import context

        if exception is not None:
            trace: Any = tracing_api()
            span.record_exception(exception)
            span.set_status(trace.Status(trace.StatusCode.ERROR, type(exception).__name__))
        context.detach(token)
        span.end()
