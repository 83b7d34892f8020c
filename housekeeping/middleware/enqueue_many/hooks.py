"""The hooks that many messages pass, found once for all of them: most middleware has none of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from dramatiq import Broker, Message, Middleware
from dramatiq.middleware import MiddlewareError


def hooks(broker: Broker, name: Literal["before_enqueue", "after_enqueue"]) -> Callable[[Message[Any]], None]:
    """What Dramatiq's `emit_before` and `emit_after` do with a message that has no delay.

    Raises, by the function that is returned:
      MiddlewareError: When a hook before the enqueueing refuses the message.
    """
    before = name == "before_enqueue"
    nothing = getattr(Middleware, name)
    called = [getattr(each, name) for each in (broker.middleware if before else reversed(broker.middleware))]
    own = [hook for hook in called if getattr(hook, "__func__", None) is not nothing]

    def pass_hooks(message: Message[Any]) -> None:
        for hook in own:
            try:
                hook(broker, message, None)
            except Exception as error:
                if before and isinstance(error, MiddlewareError):
                    raise
                broker.logger.critical("Unexpected failure in %s of %r.", name, hook.__self__, exc_info=True)

    return pass_hooks
