"""OpenTelemetry spans, in processes that have a tracer provider; without one they cost nothing."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


def tracing_api() -> Any:
    """Return the module ``opentelemetry.trace`` if the process has a tracer provider, else None.

    It is never imported here: code that sets up a provider has imported it.
    """
    trace: Any = sys.modules.get("opentelemetry.trace")
    # While another thread imports the module, it exists without its names.
    if not hasattr(trace, "ProxyTracerProvider") or not hasattr(trace, "get_tracer_provider"):
        return None
    return None if isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider) else trace


def tracer() -> Any:
    """Return the library's tracer; None without a tracer provider."""
    trace = tracing_api()
    return None if trace is None else trace.get_tracer_provider().get_tracer("housekeeping")


@contextmanager
def span(name: str) -> Iterator[None]:
    """Give the block a span, below the span of the current message."""
    current = tracer()
    if current is None:
        yield
        return
    with current.start_as_current_span(name):
        yield
