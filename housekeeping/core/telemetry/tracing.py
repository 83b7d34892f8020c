"""Spans for OpenTelemetry, where the process has it; nothing at all where it has not."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


def tracing_api() -> Any:
    """The module ``opentelemetry.trace``, when somebody has set up a provider; else None.

    Never imported here: who sets one up has imported it, and without one a span goes nowhere.
    """
    trace: Any = sys.modules.get("opentelemetry.trace")
    # While another thread is importing it, it is there without its names.
    if not hasattr(trace, "ProxyTracerProvider") or not hasattr(trace, "get_tracer_provider"):
        return None
    return None if isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider) else trace


def tracer() -> Any:
    """The library's tracer; None where there is no tracing."""
    trace = tracing_api()
    return None if trace is None else trace.get_tracer_provider().get_tracer("housekeeping")


def traced(name: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Give each call of a function a span, below the one of the message at work."""

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        @functools.wraps(function)
        def called(*args: P.args, **kwargs: P.kwargs) -> T:
            ours = tracer()
            if ours is None:
                return function(*args, **kwargs)
            with ours.start_as_current_span(name):
                return function(*args, **kwargs)

        return called

    return decorate
