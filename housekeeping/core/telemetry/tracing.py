"""OpenTelemetry spans, in processes that have a tracer provider; without one they cost nothing."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


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


def traced(name: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Decorate a function: each call becomes a span, a child of the current message's span."""

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        @functools.wraps(function)
        def called(*args: P.args, **kwargs: P.kwargs) -> T:
            current_tracer = tracer()
            if current_tracer is None:
                return function(*args, **kwargs)
            with current_tracer.start_as_current_span(name):
                return function(*args, **kwargs)

        return called

    return decorate
