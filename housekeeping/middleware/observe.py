"""What a process shows of itself: log lines and spans of its messages, metrics, health pages, heartbeats.

The message is in every log line. Actors that are no sweeps have a line at their start and end. Heartbeats of workers
and schedulers make their death noticeable. ``/-/live`` and ``/-/ready`` are beside the metrics.
"""

from __future__ import annotations

import atexit
import functools
import http.server
import importlib.util
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Final
from uuid import NAMESPACE_URL, uuid4, uuid5

import redis
import structlog
from dramatiq import Actor, Broker, Message, MessageProxy, Middleware, Worker
from dramatiq.common import q_name
from dramatiq.middleware import Shutdown
from peewee import PeeweeException

import housekeeping
from housekeeping.brokers.dramatiq_internals import InvalidOption, Requeue, called_by_periodiq, metrics_handler
from housekeeping.core import telemetry
from housekeeping.core.cron import Cron
from housekeeping.core.errors import HousekeepingError, LeaseLost, SettingsError
from housekeeping.core.interrupts import LostLease, exit_on, innermost_frame
from housekeeping.core.logs import configure, error_line, how_to_install
from housekeeping.core.logs import logger as named_logger
from housekeeping.core.redis import redis_client, shared_redis, translate_redis_errors
from housekeeping.core.settings import Settings
from housekeeping.core.telemetry import MessageContext, MessageTrigger, current_message, tracer, tracing_api, wait_times
from housekeeping.database.connection import close_databases
from housekeeping.ledger import processes as heartbeats
from housekeeping.ledger import schema
from housekeeping.ledger.processes import (
    BusyThread,
    Heartbeat,
    HeartbeatStore,
    ProcessKind,
    RedisHeartbeats,
    heartbeat_store,
    read_processes,
)
from housekeeping.middleware.consistency import data_consistency_used
from housekeeping.middleware.keys import tick_of

if TYPE_CHECKING:
    from dramatiq.middleware.prometheus import Prometheus


#: Seconds for which an answer is repeated, so that probes cannot burden the servers.
_REPEATED_S: Final = 1.0


class Readiness:
    """Whether this process, or the worker that this process serves metrics for, can do its work.

    Parameters:
      kind: ``worker`` or ``scheduler``.
    """

    def __init__(self, settings: Settings, kind: ProcessKind) -> None:
        self._settings = settings
        self._kind = kind
        self._client = None if shared_redis.is_replaced(settings) else redis_client(settings.require_redis_url())
        self._lock = threading.Lock()
        self._known: tuple[float, list[str]] | None = None

    def problems(self) -> list[str]:
        """Return what keeps it from working, one line each; empty if it is ready. Answers are a second old at most."""
        with self._lock:
            if self._known is None or time.monotonic() - self._known[0] > _REPEATED_S:
                self._known = time.monotonic(), list(self._look())
            return self._known[1]

    def _look(self) -> Iterator[str]:
        has_database = self._settings.database_url is not None
        try:
            for check in (self._ping, schema.require_all) if has_database else (self._ping,):
                try:
                    check()
                except (HousekeepingError, PeeweeException) as error:
                    yield error_line(error)
            processes = read_processes(heartbeat_store(self._settings), datetime.now(UTC))
        finally:
            if has_database:
                close_databases()
        alive = [each.heartbeat for each in processes.every if each.alive and each.heartbeat.kind == self._kind]
        here = [each for each in alive if each.host == socket.gethostname()]
        if not here:
            yield f"no {self._kind} on this host sends heartbeats"
        elif self._kind == "worker" and not any(each.queues for each in here):
            yield "no worker on this host consumes a queue"

    def _ping(self) -> None:
        with translate_redis_errors():
            if self._client is not None:
                self._client.ping()


class PageServer(http.server.ThreadingHTTPServer):
    """Server of these pages, also on an IPv6 address."""

    daemon_threads = True

    def __init__(self, host: str, port: int, page: Any) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        super().__init__((host, port), page)


def with_health(page: Any, readiness: Readiness) -> type[http.server.BaseHTTPRequestHandler]:
    """Return a handler like `page` which also answers the health pages.

    ``/-/live`` has status 200. ``/-/ready`` has 200, or 503 and a line for each problem.
    """
    inherited: type[http.server.BaseHTTPRequestHandler] = page

    class Page(inherited):  # type: ignore[misc, valid-type]
        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            if path == "/-/live":
                self._answer([])
            elif path == "/-/ready":
                self._answer(readiness.problems())
            else:
                super().do_GET()

        def _answer(self, problems: list[str]) -> None:
            body = "".join(f"{line}\n" for line in problems or ["ok"]).encode()
            self.send_response(503 if problems else 200)
            self.send_header("Content-Type", "text/plain; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    return Page


logger = named_logger(__name__)

#: Evaluates the alerts of the installation, unless another process has done so a moment ago.
Watch = Callable[[], None]
#: Interval at which each process offers to evaluate the alerts.
WATCHED: Final = timedelta(seconds=10)
_LAST_HEARTBEAT_S: Final = 5.0  # time for the last heartbeat when the process ends
#: A scheduler wakes up every minute. One that has not for so long hangs, and sends no more heartbeats.
AWAKE: Final = timedelta(minutes=3)


class Heartbeats(Middleware):
    """Middleware that sends heartbeats of a worker process from a thread of its own.

    Messages never wait for heartbeats. Busy threads are counted in memory, and an outage of Redis costs one log line.
    """

    def __init__(self, client: redis.Redis, namespace: str, watch: Watch | None = None) -> None:
        self._watch = watch
        self._store = RedisHeartbeats(client, namespace)
        #: Thread -> its message.
        self._busy: dict[int, MessageContext] = {}
        self._sender: Sender | None = None

    def after_worker_boot(self, broker: Broker, worker: Worker) -> None:
        self._sender = Sender(self._store, "worker", lambda: self._describe(worker), self._watch)
        self._sender.start()

    def after_worker_shutdown(self, broker: Broker, worker: Worker) -> None:
        if self._sender is not None:
            self._sender.stop()

    def before_process_message(self, broker: Broker, message: MessageProxy) -> None:
        if (context := current_message.get()) is not None:
            self._busy[threading.get_ident()] = context

    def after_process_message(
        self, broker: Broker, message: MessageProxy, *, result: Any = None, exception: BaseException | None = None
    ) -> None:
        self._busy.pop(threading.get_ident(), None)

    after_skip_message = after_process_message

    def _describe(self, worker: Worker) -> dict[str, Any]:
        queues, busy = sorted({q_name(queue) for queue in list(worker.consumers)}), dict(self._busy)
        threads = long_busy({ident: (each.worker or "", each.message_id, each.began) for ident, each in busy.items()})
        return {"queues": queues, "threads": worker.worker_threads, "busy": len(busy), "busy_threads": threads}


def long_busy(busy: Mapping[int, tuple[str, str, float]]) -> list[BusyThread]:
    """Return the threads that have been in the same message for over a minute, the longest ones first.

    Parameters:
      busy: Thread -> worker, message id and the monotonic time when it began.
    """
    now, found = time.monotonic(), []
    most_s = heartbeats.LONG_BUSY.total_seconds()
    long = sorted((began, ident) for ident, (*_, began) in busy.items() if now - began > most_s)
    names = {thread.ident: thread.name for thread in threading.enumerate()} if long else {}
    for began, ident in long[: heartbeats.MOST_THREADS]:
        (worker, message_id, _), place = busy[ident], innermost_frame(ident) or "an unknown place"
        texts = {"name": names.get(ident) or str(ident), "worker": worker, "frame": place}
        cut = {name: text[-heartbeats.LONGEST_TEXT :] for name, text in texts.items()}
        found.append(BusyThread(message_id=message_id[: heartbeats.LONGEST_TEXT], busy_s=now - began, **cut))
    return found


class SchedulerHeartbeats:
    """Heartbeats of a process that runs periodiq, from its first wake-up on; any other process sends none."""

    def __init__(self, client: redis.Redis, namespace: str, watch: Watch | None = None) -> None:
        self._watch = watch
        self._store = RedisHeartbeats(client, namespace)
        self._sender: Sender | None = None
        self._woke_at = 0.0

    def wake(self) -> None:
        """Record a wake-up of the scheduler."""
        self._woke_at = time.monotonic()
        if self._sender is None and called_by_periodiq():
            self._sender = Sender(self._store, "scheduler", self._while_awake, self._watch)
            self._sender.start()
            _call_at_exit(self._sender.stop)

    def _while_awake(self) -> dict[str, Any] | None:
        return {} if time.monotonic() - self._woke_at < AWAKE.total_seconds() else None


class Sender:
    """Sender of this process's heartbeats.

    Parameters:
      describe: Returns the fields that change between heartbeats, or None to send none now.
      watch: Called every ten seconds in a thread of its own, because it may take longer than a heartbeat may be late.
    """

    def __init__(
        self,
        store: HeartbeatStore,
        kind: ProcessKind,
        describe: Callable[[], dict[str, Any] | None],
        watch: Watch | None = None,
    ) -> None:
        self._watch = watch
        self._kind = kind
        self._describe = describe
        #: Identifies the process among the heartbeats.
        self.id: Final = uuid4().hex
        self._began = time.monotonic()
        self._stopping = threading.Event()
        self._store = store
        self._thread = threading.Thread(target=self._send, name="heartbeats", daemon=True)

    def start(self) -> None:
        """Start sending a heartbeat now and then one per interval; returns at once."""
        self._thread.start()
        if self._watch is not None:
            threading.Thread(target=self._look, args=(self._watch,), name="alerts", daemon=True).start()

    def _look(self, watch: Watch) -> None:
        """Evaluate the alerts until the process stops, also while no page or command reads them."""
        failing = False
        while not self._stopping.wait(WATCHED.total_seconds()):
            failing = _fails(watch, "PostgreSQL", "Alerts cannot be evaluated; retrying", failing)
            close_databases()  # a connection used every few seconds need not stay open

    def stop(self) -> None:
        """Send a last heartbeat that marks the process as stopped, and wait a few seconds for it."""
        self._stopping.set()
        self._thread.join(_LAST_HEARTBEAT_S)

    def _send(self) -> None:
        failing, stopped = False, False
        while not stopped:
            stopped = self._stopping.is_set()
            write = functools.partial(self._write, stopped)
            server, before = self._store.server, failing
            failing = _fails(write, server, "Heartbeats cannot be sent; retrying", failing)
            if before and not failing:
                logger.info("Heartbeats are sent again")
            if not stopped:
                self._stopping.wait(heartbeats.INTERVAL.total_seconds())

    def _write(self, stopped: bool) -> None:
        fields = self._describe()
        if fields is None:
            return
        heartbeat = Heartbeat(
            kind=self._kind,
            host=socket.gethostname(),
            pid=os.getpid(),
            version=housekeeping.__version__,
            up_s=time.monotonic() - self._began,
            stopped=stopped,
            **fields,
        )
        process = (heartbeat.kind, f"{heartbeat.host}:{heartbeat.pid}")
        telemetry.PROCESS_HEARTBEAT.set(time.time(), *process, ",".join(heartbeat.queues), heartbeat.version)
        telemetry.PROCESS_THREADS.set(heartbeat.threads, *process)
        telemetry.PROCESS_BUSY_THREADS.set(heartbeat.busy, *process)
        self._store.write(self.id, heartbeat)


def _fails(step: Callable[[], None], server: str, trouble: str, failed_before: bool) -> bool:
    """Run the step and export whether its server is available; return whether it failed. Log only the first failure."""
    try:
        step()
    except Exception as error:
        telemetry.SERVER_UNAVAILABLE.set(1, server)
        close_databases()  # after a failover, the connection may lead to a standby
        if not failed_before:
            logger.warning(trouble, error=error_line(error))
        return True
    telemetry.SERVER_UNAVAILABLE.set(0, server)
    return False


def _call_at_exit(stop: Callable[[], None]) -> None:
    process = os.getpid()
    # A forked child has no thread that would send anything.
    atexit.register(lambda: stop() if os.getpid() == process else None)
    in_main_thread = threading.current_thread() is threading.main_thread()
    if in_main_thread and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        # periodiq has no handler of its own, so SIGTERM would end it without a last heartbeat.
        atexit.register(exit_on(signal.SIGTERM))


_OF_ACTORS: Final = (
    *(telemetry.DEDUPLICATED, telemetry.RETRIES, telemetry.DEAD_LETTERS),
    *(telemetry.LEASES_REQUESTED, telemetry.LEASES_HELD, telemetry.LEASES_LOST),
)


class Metrics(Middleware):
    """Middleware that exports each actor's metrics as 0 before its first message, so that rates see the first increase.

    An actor with metrics of its own has the option ``metrics``: a function that exports them. It gets the actor's
    schedule, or None.

    Note: The export itself is done by Dramatiq's ``Prometheus``, see `exposition`.
    """

    @property
    def actor_options(self) -> set[str]:
        return {"metrics"}

    def after_worker_boot(self, broker: Broker, worker: Worker) -> None:
        for name, actor in broker.actors.items():
            export_zeros(name)
            cron, export = actor.options.get("periodic"), actor.options.get("metrics")
            if export is not None:
                export(cron if isinstance(cron, Cron) else None)


def export_zeros(worker: str) -> None:
    """Export the counters of a worker as 0."""
    for counter in _OF_ACTORS:
        counter.add(worker, number=0)


def exposition(settings: Settings) -> Prometheus:
    """Return Dramatiq's middleware for the metrics page, which serves at the address in the settings.

    Raises:
      SettingsError: When prometheus-client is not installed.
    """
    require_prometheus()
    # Imported here, because the import reads its folder from the environment and creates it.
    from dramatiq.middleware.prometheus import Prometheus as DramatiqsOwn

    class Prometheus(DramatiqsOwn):  # its name is looked up to put it first
        @property
        def forks(self) -> list[Callable[[], int]]:
            return [serve]

    return Prometheus()


def require_prometheus() -> None:
    """Raise SettingsError unless prometheus-client is installed; does not import it."""
    if importlib.util.find_spec("prometheus_client") is None:
        raise SettingsError(
            f"a port for metrics is set, but prometheus-client is not installed: {how_to_install('metrics')}"
        )


def serve() -> int:
    """Serve the pages of all processes of a worker, metrics and health, in a process that Dramatiq forks."""
    settings = Settings.load()
    configure(settings.log_level, settings.log_format)
    assert settings.metrics_port is not None
    if settings.database_url is not None:
        schema.use_database(settings)
    address = (settings.metrics_host, settings.metrics_port)
    try:
        server = PageServer(*address, with_health(metrics_handler(), Readiness(settings, "worker")))
    except OSError as error:
        logger.error("Metrics cannot be served", host=address[0], port=address[1], error=str(error))
        return 1
    logger.info("Metrics are served", host=address[0], port=address[1])
    with server:
        server.serve_forever()
    return 0


_logs: Final = logging.getLogger(__name__)  # asked for its level, which costs a tenth of a line that is not written

_CONSISTENCIES: Final = ("always", "sticky", "delayed")
#: The library's actor options. An actor without any logs its runs at debug level.
OPTIONS: Final = frozenset(
    {
        *("data_consistency", "deduplicate", "deduplication", "exclusive_lease", "feature_category"),
        *("idempotency", "idempotent", "metrics", "periodic", "rediscovered", "schedule", "sweep"),
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
        trigger: MessageTrigger = "schedule" if tick else "parent" if parent else "enqueue"
        current_message.set(MessageContext(message.message_id, trigger, tick, self._stopping, message.actor_name))
        self._name(broker, message)
        actor = broker.get_actor(message.actor_name)
        if "sweep" not in actor.options and _logs.isEnabledFor(level := _level(actor)):
            logger.log(level, "Run started", trigger=trigger, tick=tick)

    def after_process_message(
        self, broker: Broker, message: MessageProxy, *, result: Any = None, exception: BaseException | None = None
    ) -> None:
        actor = broker.get_actor(message.actor_name)
        if "sweep" not in actor.options:
            self._log_end(broker, message, _level(actor), _outcome(exception))
        self._forget()

    def after_skip_message(self, broker: Broker, message: MessageProxy) -> None:
        # Dramatiq calls this hook while it handles the SkipMessage, and does not pass it on.
        self._log_end(broker, message, logging.INFO, "skipped", reason=str(sys.exception() or ""))
        self._forget()

    def _log_end(self, broker: Broker, message: MessageProxy, level: int, outcome: str, **more: str) -> None:
        context = current_message.get()
        if context is None:
            # A middleware before this one skipped the message.
            self._name(broker, message)
            context = MessageContext(message.message_id)
        duration_s = time.monotonic() - context.began
        spent = wait_times().since(context.waited)
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
        name = message.actor_name
        runs: telemetry.Measurement = (telemetry.RUNS, (name, outcome), "inc", 1)
        if outcome == "skipped":
            telemetry.exporter.measure(runs)
            return
        telemetry.exporter.measure(
            runs,
            (telemetry.DURATION, (name,), "observe", duration_s),
            (telemetry.DATABASE_TIME, (name,), "inc", spent.database_s),
            (telemetry.REDIS_TIME, (name,), "inc", spent.redis_s),
        )

    def _name(self, broker: Broker, message: MessageProxy) -> None:
        options = broker.get_actor(message.actor_name).options
        structlog.contextvars.bind_contextvars(
            worker=message.actor_name,
            message_id=message.message_id,
            **{name: options[name] for name in ("feature_category", "data_consistency") if name in options},
        )

    def _forget(self) -> None:
        current_message.set(None)
        structlog.contextvars.unbind_contextvars(*_CONTEXT)


def _level(actor: Actor[..., Any]) -> int:
    """Return the level of an actor's start and end lines: debug if it uses none of the library's options."""
    return logging.DEBUG if OPTIONS.isdisjoint(actor.options) else logging.INFO


def _outcome(exception: BaseException | None) -> str:
    if exception is None:
        return "done"
    if isinstance(exception, Requeue | Shutdown):
        return "put_back"
    return "lost_lease" if isinstance(exception, LostLease | LeaseLost) else "failed"


class CheckIns(Middleware):
    """Middleware that checks in with Sentry (Crons) when a tick's run begins and ends: one monitor for each schedule.

    Sentry raises the alarm for a run that failed, did not begin, or did not end. It does nothing in a process that has
    not set up Sentry.
    """

    def before_process_message(self, broker: Broker, message: MessageProxy) -> None:
        self._check_in(broker, message, "in_progress", None)

    def after_process_message(
        self, broker: Broker, message: MessageProxy, *, result: Any = None, exception: BaseException | None = None
    ) -> None:
        context = current_message.get()
        # After a requeue, the next delivery ends the same check-in.
        if context is not None and not isinstance(exception, Requeue | Shutdown):
            # A run that its breaker stopped raises nothing.
            status = "ok" if exception is None and not context.failed else "error"
            self._check_in(broker, message, status, time.monotonic() - context.began)

    def _check_in(self, broker: Broker, message: MessageProxy, status: str, duration_s: float | None) -> None:
        if tick_of(message) is None:
            return
        options = broker.get_actor(message.actor_name).options
        cron, limit_ms = options.get("periodic"), message.options.get("time_limit") or options.get("time_limit")
        if not isinstance(cron, Cron):
            return
        # The same for every delivery of an attempt, and another one for each retry.
        attempt = f"{message.message_id}:{message.options.get('retries', 0)}"
        telemetry.check_in(
            message.actor_name,
            uuid5(NAMESPACE_URL, attempt).hex,
            status,
            duration_s,
            schedule=cron.spec,
            zone=str(cron.zone),
            longest=None if limit_ms is None else timedelta(milliseconds=limit_ms),
        )


#: The message option with the sender's trace: W3C's ``traceparent`` and ``tracestate``.
OPTION: Final = "trace"


class _SpanOfThread(threading.local):
    #: The span of the running message, and the token that detaches it.
    span: Any = None
    token: Any = None


def sending(*messages: Message[Any]) -> AbstractContextManager[None]:
    """Give the sending of new messages to one queue a span, and put its context into them.

    A message that has been sent before, such as a retry, keeps the context of its first sender.
    """
    own_tracer = None if OPTION in messages[0].options else tracer()
    return nullcontext() if own_tracer is None else _span_of(own_tracer, messages)


@contextmanager
def _span_of(own_tracer: Any, messages: Sequence[Message[Any]]) -> Iterator[None]:
    from opentelemetry import propagate

    queue = q_name(messages[0].queue_name)
    attributes = _messaging("send", queue) | {"housekeeping.worker": messages[0].actor_name}
    if len(messages) > 1:
        attributes["messaging.batch.message_count"] = len(messages)
    else:
        attributes["messaging.message.id"] = messages[0].message_id
    kind: Any = tracing_api().SpanKind.PRODUCER
    with own_tracer.start_as_current_span(f"send {queue}", kind=kind, attributes=attributes) as span:
        carrier: dict[str, str] = {}
        propagate.inject(carrier)
        for message in messages if carrier else ():
            message.options[OPTION] = dict(carrier)
        try:
            yield
        except BaseException as error:
            span.set_attribute("error.type", type(error).__qualname__)
            raise


def _messaging(operation: str, queue: str) -> dict[str, Any]:
    """Return the attributes of OpenTelemetry's semantic conventions for messaging."""
    return {
        "messaging.system": "dramatiq",
        "messaging.operation.name": operation,
        "messaging.operation.type": operation,
        "messaging.destination.name": queue,
    }


class Traces(Middleware):
    """Middleware that gives each run a span of OpenTelemetry, below and linked to the one that sent its message.

    Actors need no option. It works in each process that has set up OpenTelemetry, by ``opentelemetry-instrument
    housekeeping worker`` or the application's own provider, and costs nothing in others. A retry belongs to the trace
    of the message's first sender.
    """

    def __init__(self) -> None:
        self._thread = _SpanOfThread()

    def before_process_message(self, broker: Broker, message: MessageProxy) -> None:
        own_tracer = tracer()
        if own_tracer is None:
            return
        from opentelemetry import context, propagate

        self._end(None)  # an interrupted hook may have left a span
        trace: Any = tracing_api()
        carrier = message.options.get(OPTION)
        sent = propagate.extract(carrier if isinstance(carrier, dict) else {})
        sender = trace.get_current_span(sent).get_span_context()
        queue = q_name(message.queue_name)
        self._thread.span = own_tracer.start_span(
            f"process {queue}",
            context=sent,
            kind=trace.SpanKind.CONSUMER,
            links=[trace.Link(sender)] if sender.is_valid else [],
            attributes=_messaging("process", queue)
            | {
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
            span.set_attribute("error.type", type(exception).__qualname__)
            span.set_status(trace.Status(trace.StatusCode.ERROR, type(exception).__name__))
        context.detach(token)
        span.end()
