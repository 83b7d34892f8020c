"""Calls of middleware hooks. A hook that a middleware only inherits is skipped."""

from __future__ import annotations

from typing import Any

from dramatiq import Broker, Middleware
from dramatiq.middleware import MiddlewareError


def call_defined_hooks_only(broker: Broker) -> None:
    """Let the broker skip hooks that do nothing; with two dozen middleware they cost as much as a message itself."""
    if type(broker).emit_before is Broker.emit_before and type(broker).emit_after is Broker.emit_after:
        hooks = _Hooks(broker)
        broker.emit_before = hooks.emit_before  # type: ignore[method-assign]
        broker.emit_after = hooks.emit_after  # type: ignore[method-assign]


class _Hooks:
    """Replacement for a broker's ``emit_before`` and ``emit_after``, which behave like Dramatiq's."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._middleware: list[Middleware] = []
        self._defined: dict[str, list[Middleware]] = {}  # by hook, in the order of the calls

    def emit_before(self, signal: str, *args: Any, **kwargs: Any) -> None:
        hook = f"before_{signal}"
        for middleware in self._that_define(hook):
            try:
                getattr(middleware, hook)(self._broker, *args, **kwargs)
            except MiddlewareError:
                raise
            except Exception:
                self._log(hook, middleware)

    def emit_after(self, signal: str, *args: Any, **kwargs: Any) -> None:
        hook = f"after_{signal}"
        for middleware in self._that_define(hook):
            try:
                getattr(middleware, hook)(self._broker, *args, **kwargs)
            except Exception:
                self._log(hook, middleware)

    def _that_define(self, hook: str) -> list[Middleware]:
        if self._middleware != self._broker.middleware:  # a worker adds its own at its start
            self._middleware, self._defined = list(self._broker.middleware), {}
        defined = self._defined.get(hook)
        if defined is None:
            inherited = getattr(Middleware, hook, None)
            defined = [
                each for each in self._middleware if getattr(getattr(each, hook), "__func__", None) is not inherited
            ]
            self._defined[hook] = defined if hook.startswith("before_") else defined[::-1]
        return self._defined[hook]

    def _log(self, hook: str, middleware: Middleware) -> None:
        self._broker.logger.critical("Unexpected failure in %s of %r.", hook, middleware, exc_info=True)
