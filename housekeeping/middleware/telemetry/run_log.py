"""Run log: the message in every log line, and the start and end of actors that are no sweeps."""

from __future__ import annotations

import logging
import sys
import threading
import time
from typing import Any, Final

import structlog
from dramatiq import Actor, Broker, MessageProxy, Middleware, Worker
from dramatiq.middleware import Shutdown

from housekeeping.core.errors import LeaseLost
from housekeeping.core.middleware_errors import InvalidOption, Requeue
from housekeeping.core.telemetry import metrics
from housekeeping.core.telemetry.context import MessageContext, Trigger, WaitTimes, current_message, wait_times
from housekeeping.core.telemetry.logs import logger as named_logger
from housekeeping.core.thread_interrupt import LostLease
from housekeeping.database.replicas.routing import data_consistency_used
from housekeeping.middleware.schedule.tick_recorder import records_its_runs, tick_of

logger = named_logger(__name__)
_logs: Final = logging.getLogger(__name__)  # asked for its level, which costs a tenth of a line that is not written

_CONSISTENCIES: Final = ("always", "sticky", "delayed")
#: The library's actor options. An actor without any logs its runs at debug level.
OPTIONS: Final = frozenset(
    {
        *("data_consistency", "deduplicate", "deduplication", "exclusive_lease", "feature_category"),
        *("idempotency", "idempotent", "periodic", "rediscovered", "schedule", "sweep"),
    }
)
#: All that a message binds in the thread's log context; the engine binds `run_id`.
_CONTEXT: Final = ("worker", "message_id", "feature_category", "data_consistency", "run_id")


class RunLog(Middleware):
    """Middleware that binds the running message to the thread's log lines and to `current_message`.

    An actor may name its feature category and how fresh its reads must be::

        @dramatiq.actor(feature_category="user_profile", data_consistency="sticky")
        def sweep() -> None: ...

    Also sets `MessageContext.stopping` when the process is asked to shut down.
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
        tick = tick_of(message)
        parent = message.options.get("trigger") == "parent"
        trigger: Trigger = "schedule" if tick else "parent" if parent else "enqueue"
        current_message.set(MessageContext(message.message_id, trigger, tick, self._stopping, message.actor_name))
        self._name(broker, message)
        self._started.at, self._started.waited = time.monotonic(), wait_times()
        actor = broker.get_actor(message.actor_name)
        if not records_its_runs(actor) and _logs.isEnabledFor(level := _level(actor)):
            logger.log(level, "Run started", trigger=trigger, tick=tick)

    def after_process_message(
        self, broker: Broker, message: MessageProxy, *, result: Any = None, exception: BaseException | None = None
    ) -> None:
        actor = broker.get_actor(message.actor_name)
        if not records_its_runs(actor):
            self._log_end(broker, message, _level(actor), _outcome(exception))
        self._forget()

    def after_skip_message(self, broker: Broker, message: MessageProxy) -> None:
        # Dramatiq calls this hook while it handles the SkipMessage, and does not pass it on.
        self._log_end(broker, message, logging.INFO, "skipped", reason=str(sys.exception() or ""))
        self._forget()

    def _log_end(self, broker: Broker, message: MessageProxy, level: int, outcome: str, **more: str) -> None:
        started_at = getattr(self._started, "at", None)
        if started_at is None:
            # A middleware before this one skipped the message.
            self._name(broker, message)
            started_at, self._started.waited = time.monotonic(), wait_times()
        duration_s = time.monotonic() - started_at
        spent = wait_times().since(self._started.waited)
        if _logs.isEnabledFor(level):
            logger.log(
                level,
                "Run ended",
                outcome=outcome,
                **more,
                duration_s=round(duration_s, 3),
                **spent.as_fields(),
                data_consistency_used=data_consistency_used(),
            )
        _measure(message.actor_name, outcome, duration_s, spent)

    def _name(self, broker: Broker, message: MessageProxy) -> None:
        options = broker.get_actor(message.actor_name).options
        structlog.contextvars.bind_contextvars(
            worker=message.actor_name,
            message_id=message.message_id,
            **{name: options[name] for name in ("feature_category", "data_consistency") if name in options},
        )

    def _forget(self) -> None:
        current_message.set(None)
        self._started.at = None
        structlog.contextvars.unbind_contextvars(*_CONTEXT)


def _level(actor: Actor[..., Any]) -> int:
    """Return the level of an actor's start and end lines: debug if it uses none of the library's options."""
    return logging.DEBUG if OPTIONS.isdisjoint(actor.options) else logging.INFO


def _measure(worker: str, outcome: str, duration_s: float, spent: WaitTimes) -> None:
    metrics.RUNS.add(worker, outcome)
    if outcome != "skipped":
        metrics.DURATION.observe(duration_s, worker)
        metrics.DATABASE_TIME.add(worker, number=spent.database_s)
        metrics.REDIS_TIME.add(worker, number=spent.redis_s)


def _outcome(exception: BaseException | None) -> str:
    if exception is None:
        return "done"
    if isinstance(exception, Requeue | Shutdown):
        return "put_back"
    return "lost_lease" if isinstance(exception, LostLease | LeaseLost) else "failed"
