"""Names the message at work for log lines and for the run below, and logs the start and end of plain actors."""

from __future__ import annotations

import threading
import time
from typing import Any, Final

import structlog
from dramatiq import Actor, Broker, MessageProxy, Middleware, Worker

from housekeeping.foundation.context import MessageContext, Trigger, current_message
from housekeeping.foundation.logs import logger as named_logger
from housekeeping.foundation.steering import InvalidOption, PutBack
from housekeeping.middleware.schedule import tick_of

logger = named_logger(__name__)

_CONSISTENCIES: Final = ("always", "sticky", "delayed")
_CONTEXT: Final = ("worker", "message_id", "feature_category", "data_consistency")


class RunLog(Middleware):
    """Middleware that says which message a thread is at work on.

    An actor may say whose it is and how fresh its reads must be::

        @dramatiq.actor(feature_category="user_profile", data_consistency="sticky")
        def sweep() -> None: ...

    Also tells runs that their process has been asked to shut down (`MessageContext.stopping`).
    """

    def __init__(self) -> None:
        self._stopping = threading.Event()
        self._started = threading.local()

    @property
    def actor_options(self) -> set[str]:
        return {"feature_category", "data_consistency", "sweep"}

    def before_declare_actor(self, broker: Broker, actor: Actor[..., Any]) -> None:
        consistency = actor.options.get("data_consistency")
        if consistency is not None and consistency not in _CONSISTENCIES:
            raise InvalidOption(
                f"{actor.actor_name}: data_consistency is {consistency!r}; "
                f"it should be one of {', '.join(_CONSISTENCIES)}"
            )

    def before_worker_boot(self, broker: Broker, worker: Worker) -> None:
        self._stopping.clear()

    def before_worker_shutdown(self, broker: Broker, worker: Worker) -> None:
        self._stopping.set()

    def before_process_message(self, broker: Broker, message: MessageProxy) -> None:
        options = broker.get_actor(message.actor_name).options
        tick = tick_of(message)
        parent = message.options.get("trigger") == "parent"
        trigger: Trigger = "schedule" if tick else "parent" if parent else "enqueue"
        current_message.set(MessageContext(message.message_id, trigger, tick, self._stopping))
        structlog.contextvars.bind_contextvars(
            worker=message.actor_name,
            message_id=message.message_id,
            **{name: options[name] for name in ("feature_category", "data_consistency") if name in options},
        )
        self._started.at = time.monotonic()
        if "sweep" not in options:
            logger.info("Run started", trigger=trigger, tick=tick)

    def after_process_message(
        self, broker: Broker, message: MessageProxy, *, result: Any = None, exception: BaseException | None = None
    ) -> None:
        if "sweep" not in broker.get_actor(message.actor_name).options:
            outcome = "done" if exception is None else "put_back" if isinstance(exception, PutBack) else "failed"
            self._log_end(outcome)
        self._forget()

    def after_skip_message(self, broker: Broker, message: MessageProxy) -> None:
        self._log_end("skipped")
        self._forget()

    def _log_end(self, outcome: str) -> None:
        duration_s = round(time.monotonic() - getattr(self._started, "at", time.monotonic()), 3)
        logger.info("Run ended", outcome=outcome, duration_s=duration_s)

    def _forget(self) -> None:
        current_message.set(None)
        structlog.contextvars.unbind_contextvars(*_CONTEXT)
