"""What a process reports about itself: metrics, errors, and the time it waited for servers.

`telemetry` holds what belongs to the current thread: its message, the time it waited for PostgreSQL and Redis, and its
trace span. Errors are reported to Sentry, if it is configured, and to hooks of the application.

prometheus-client decides at its first import whether processes share their values, and Dramatiq's middleware prepares
that when a worker process boots. An earlier import, caused by a measurement, would lose the values of that process. So
this module never imports it, and measures nothing before it is imported.
"""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import partial
from math import ceil
from typing import Any, ClassVar, Final, Literal

import housekeeping
from housekeeping.core.errors import SettingsError
from housekeeping.core.logs import how_to_install, to_log_value
from housekeeping.core.logs import logger as named_logger

#: Sender of a message: the schedule, application code, a parent worker.
MessageTrigger = Literal["schedule", "enqueue", "parent"]


@dataclass(frozen=True, slots=True)
class WaitTimes:
    """Seconds that a thread has waited, in total or since an earlier reading.

    Attributes:
      database_s: For PostgreSQL, on the library's own connection: statements, commits, connecting.
      redis_s: For Redis, by clients of `redis_client`.
    """

    database_s: float = 0.0
    redis_s: float = 0.0

    def since(self, before: WaitTimes) -> WaitTimes:
        """Return the wait times since `before`, an earlier reading of the same thread."""
        return WaitTimes(self.database_s - before.database_s, self.redis_s - before.redis_s)

    def as_fields(self) -> dict[str, float]:
        """Return the fields of a log line."""
        return {"db_s": round(self.database_s, 3), "redis_s": round(self.redis_s, 3)}


class _ThreadState(threading.local):
    database = 0.0
    redis = 0.0
    waiting = False


_thread_state: Final = _ThreadState()


def wait_times() -> WaitTimes:
    """Return the total wait times of this thread."""
    return WaitTimes(_thread_state.database, _thread_state.redis)


@dataclass(slots=True)  # not frozen, which takes longer to make
class MessageContext:
    """The message that the current thread processes.

    Attributes:
      message_id: Dramatiq's id; retries and redeliveries keep it.
      trigger: Its sender.
      tick: Nominal time of its tick; None if it was not scheduled.
      stopping: Set once the worker process is shutting down.
      worker: Name of the actor; None if a test or a tool gave none.
      failed: Whether its run has failed, also if it is not retried for that.
      began: When its processing began, by the monotonic clock.
      waited: The thread's wait times then.
    """

    message_id: str
    trigger: MessageTrigger = "enqueue"
    tick: datetime | None = None
    stopping: threading.Event = field(default_factory=threading.Event)
    worker: str | None = None
    failed: bool = False
    began: float = field(default_factory=time.monotonic)
    waited: WaitTimes = field(default_factory=wait_times)


#: Set by the run log middleware during each message; None on the command line and in other code.
current_message: Final[ContextVar[MessageContext | None]] = ContextVar("current_message", default=None)


def waiting_for(server: Literal["database", "redis"]) -> AbstractContextManager[None]:
    """Count the time of the block as waiting for a server; nested blocks belong to the outer one."""
    return _Waiting(server)


class _Waiting:  # not a generator, which takes twice as long: each command to a server has such a block
    __slots__ = ("_began", "_server")

    def __init__(self, server: Literal["database", "redis"]) -> None:
        self._server = server
        self._began: float | None = None

    def __enter__(self) -> None:
        if not _thread_state.waiting:
            _thread_state.waiting = True
            self._began = time.perf_counter()

    def __exit__(self, *error: object) -> None:
        if self._began is not None:
            _thread_state.waiting = False
            waited_s = getattr(_thread_state, self._server) + time.perf_counter() - self._began
            setattr(_thread_state, self._server, waited_s)


def tracing_api() -> Any:
    """Return the module ``opentelemetry.trace`` if the process has a tracer provider, else None.

    It is never imported here: code that sets up a provider has imported it.
    """
    return _opentelemetry("trace", "get_tracer_provider")


def _opentelemetry(api: str, get_provider: str) -> Any:
    module: Any = sys.modules.get(f"opentelemetry.{api}")
    # While another thread imports the module, it exists without its names.
    get = getattr(module, get_provider, None)
    # The provider of a process that has set up none passes all calls on to the one that may come.
    return None if get is None or type(get()).__name__.lstrip("_").startswith("Proxy") else module


def tracer() -> Any:
    """Return the library's tracer; None without a tracer provider."""
    trace = tracing_api()
    return None if trace is None else trace.get_tracer_provider().get_tracer("housekeeping")


@contextmanager
def batch_span() -> Iterator[None]:
    """Give the block of a batch a span, below the span of the current message."""
    current = tracer()
    if current is None:
        yield
        return
    with current.start_as_current_span("housekeeping.batch"):
        yield


_plain_logger = logging.getLogger(__name__)

_EVENT_DEPTH: Final = 30  # deeper than anything Sentry's client nests
Hook = Callable[[BaseException, dict[str, Any]], None]

#: Called with the error and its context. Append your own; a hook that raises is logged and skipped.
hooks: Final[list[Hook]] = []
#: Attribute of an error that was reported, or whose cause was, so that no integration of Sentry reports it again.
_REPORTED: Final = "_housekeeping_reported"
#: Loggers whose lines of level error are about errors that are reported as well.
_REPORTED_LOGGERS: Final = (
    "housekeeping.core.events",
    "housekeeping.engine.",
    "housekeeping.sweeps.send",
    "housekeeping.workers.ci_stuck_builds",
    "housekeeping.workers.object_storage",
)
_CONTEXT: Final = "housekeeping"  # name of the context in Sentry's events


def report(error: BaseException, /, **context: Any) -> None:
    """Call every hook with the error; never raises."""
    withhold(error)
    for hook in hooks:
        try:
            hook(error, context)
        except Exception:
            _plain_logger.exception("An error hook failed: %r", hook)


def withhold(error: BaseException) -> None:
    """Keep Sentry's integrations from reporting an error whose cause was reported a short while ago."""
    setattr(error, _REPORTED, True)


def require_sentry() -> None:
    """Check that sentry-sdk is installed, without importing it.

    Raises:
      SettingsError: If it is not installed.
    """
    if importlib.util.find_spec("sentry_sdk") is None:
        raise SettingsError(
            f"HOUSEKEEPING_SENTRY_DSN is set, but sentry-sdk is not installed: {how_to_install('sentry')}"
        )


def report_to_sentry(dsn: str | None) -> None:
    """Configure Sentry, if the settings have a DSN; call it before the broker is created.

    Raises:
      SettingsError: If the extra ``sentry`` is not installed.
    """
    if dsn is None:
        return
    require_sentry()
    import sentry_sdk

    # Local variables contain URLs and rows, and messages may quote a URL.
    sentry_sdk.init(
        dsn=dsn,
        include_local_variables=False,
        before_send=lambda event, hint: to_log_value(drop_repeated(event, hint), _EVENT_DEPTH),
    )
    hooks.append(to_sentry)


def to_sentry(error: BaseException, context: dict[str, Any]) -> None:
    """Send the error to Sentry, grouped by worker and cause; a hook."""
    import sentry_sdk

    with sentry_sdk.new_scope() as scope:
        scope.set_context(_CONTEXT, context)
        if "cause" in context:
            scope.fingerprint = [str(context.get("worker")), str(context["cause"])]
        sentry_sdk.capture_exception(error)


_SLUG: Final = 50  # characters of the name of a monitor
_LATE_MIN: Final = 5  # minutes that a tick's run may wait in its queue


def check_in(
    name: str,
    check_in_id: str,
    status: str,
    duration_s: float | None,
    *,
    schedule: str,
    zone: str,
    longest: timedelta | None,
) -> None:
    """Check in with Sentry's monitor of a schedule, and create or update the monitor; never raises.

    Parameters:
      status: ``in_progress``, ``ok`` or ``error``.
      longest: Duration after which a run counts as lost.
    """
    sentry_sdk: Any = sys.modules.get("sentry_sdk")
    if not hasattr(sentry_sdk, "get_client") or not sentry_sdk.get_client().is_active():
        return
    from sentry_sdk.crons import capture_checkin

    monitor: Any = {
        "schedule": {"type": "crontab", "value": schedule},
        "timezone": zone,
        "checkin_margin": _LATE_MIN,
        **({} if longest is None else {"max_runtime": ceil(longest / timedelta(minutes=1))}),
    }
    try:
        capture_checkin(_slug(name), check_in_id, status, duration_s, monitor)
    except Exception:
        _plain_logger.exception("Sentry check-in could not be sent")


def _slug(name: str) -> str:
    plain = re.sub(r"[^a-z0-9_-]+", "-", name.lower())
    if len(plain) <= _SLUG:
        return plain
    return f"{plain[: _SLUG - 9]}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"


def drop_repeated(event: Any, hint: Mapping[str, Any]) -> Any:
    """Return the event, or None if `report` has made another one of it; to be used as Sentry's ``before_send``.

    Sentry's integrations make events of lines of level error and of exceptions that an actor raises.
    """
    if _CONTEXT in event.get("contexts", {}):
        return event
    record = hint.get("log_record")
    if record is not None and record.name.startswith(_REPORTED_LOGGERS):
        return None
    _, error, _ = hint.get("exc_info") or (None, None, None)
    return None if getattr(error, _REPORTED, False) else event


logger = named_logger(__name__)


@dataclass(frozen=True, slots=True, eq=False)  # compared by identity, which is faster: each message measures some
class Metric:
    """One metric.

    Attributes:
      name: Its name in Prometheus.
      text: Its description.
      labels: The names of its labels.
    """

    name: str
    text: str
    labels: tuple[str, ...]
    kind: ClassVar[str]
    options: ClassVar[Mapping[str, Any]] = {}


class Counter(Metric):
    """Value that only increases, summed over all processes."""

    __slots__ = ()
    kind = "Counter"

    def add(self, *labels: str, number: float = 1) -> None:
        """Increase the counter; 0 exports it before the first count. Never raises."""
        exporter.measure((self, labels, "inc", number))


class Gauge(Metric):
    """Value that increases and decreases; the latest one of all processes counts."""

    __slots__ = ()
    kind = "Gauge"
    options: ClassVar = {"multiprocess_mode": "mostrecent"}

    def set(self, value: float, *labels: str) -> None:
        """Set the value. Never raises."""
        exporter.measure((self, labels, "set", value))


class GaugeOfProcess(Gauge):
    """Gauge of which each process exports its own value; if several share a page, with the label ``pid``."""

    __slots__ = ()
    options: ClassVar = {"multiprocess_mode": "all"}


class Histogram(Metric):
    """Durations in seconds, in buckets that include the limits of the workers' documents."""

    __slots__ = ()
    kind = "Histogram"
    options: ClassVar = {"buckets": (0.05, 0.25, 1, 5, 15, 30, 60, 120, 250, 600, 1200, 1800, 3600)}

    def observe(self, seconds: float, *labels: str) -> None:
        """Add a duration. Never raises."""
        exporter.measure((self, labels, "observe", seconds))


#: A metric, its labels, the method that measures it, and the value.
Measurement = tuple[Metric, tuple[str, ...], Literal["inc", "set", "observe"], float]


class _Instruments:
    """The metrics as instruments of OpenTelemetry, once the process has a meter provider.

    Gauges and counters are observed when they are exported, with their values since the process has imported
    OpenTelemetry: OpenTelemetry would export a gauge that is set once, such as a limit, only once. Not thread-safe.
    """

    def __init__(self) -> None:
        self._values: dict[Metric, dict[tuple[str, ...], float]] = {}
        self._provider: Any = None
        self._histograms: dict[Metric, Any] = {}

    def measure(self, measurements: Iterable[Measurement]) -> None:
        """Add to, or set, the values with these labels."""
        api = _opentelemetry("metrics", "get_meter_provider")
        if api is not None and api.get_meter_provider() is not self._provider:
            self._provider = api.get_meter_provider()
            self._create(api)
        for metric, labels, method, value in measurements:
            if method != "observe":
                values = self._values.setdefault(metric, {})
                values[labels] = values.get(labels, 0) + value if method == "inc" else value
            elif api is not None:
                self._histograms[metric].record(value, dict(zip(metric.labels, labels, strict=True)))

    def _create(self, api: Any) -> None:
        meter = self._provider.get_meter("housekeeping", housekeeping.__version__)
        for metric in ALL:
            unit = "s" if "_seconds" in metric.name else ""
            if isinstance(metric, Histogram):
                buckets = metric.options["buckets"]
                self._histograms[metric] = meter.create_histogram(
                    metric.name, unit, metric.text, explicit_bucket_boundaries_advisory=buckets
                )
                continue
            is_counter = isinstance(metric, Counter)
            create = meter.create_observable_counter if is_counter else meter.create_observable_gauge
            create(metric.name, [partial(self._observe, metric, api)], unit, metric.text)

    def _observe(self, metric: Metric, api: Any, options: Any) -> list[Any]:
        return [
            api.Observation(value, dict(zip(metric.labels, labels, strict=True)))
            for labels, value in list(self._values.get(metric, {}).items())
        ]


class Exporter:
    """The metrics in prometheus-client and OpenTelemetry.

    Measurements from before the process has imported the one or the other are dropped there.

    Parameters:
      options: Passed to prometheus-client with each metric, such as a registry.
    """

    def __init__(self, options: Mapping[str, Any] | None = None) -> None:
        self._options = options or {}
        self._created: dict[Metric, Any] = {}
        self._failed = False
        self._begin()
        os.register_at_fork(after_in_child=self._begin)

    def _begin(self) -> None:
        self._lock = threading.Lock()
        # Another process than the one before a fork, which exports its own values.
        self._instruments: _Instruments | None = _Instruments()

    def measure(self, *measurements: Measurement) -> None:
        """Call the method of each metric with these labels. Several at once cost little more than one."""
        if self._instruments is not None and "opentelemetry.metrics" in sys.modules:
            try:
                with self._lock:
                    self._instruments.measure(measurements)
            except Exception:
                self._instruments = None
                logger.exception("Metrics are not exported by OpenTelemetry")
        prometheus: Any = sys.modules.get("prometheus_client")
        # While another thread imports the module, it exists without its names.
        if self._failed or not hasattr(prometheus, "generate_latest"):
            return
        try:
            for metric, labels, method, value in measurements:
                with self._lock:
                    if metric not in self._created:
                        kind, options = getattr(prometheus, metric.kind), {**metric.options, **self._options}
                        self._created[metric] = kind(metric.name, metric.text, metric.labels, **options)
                created = self._created[metric]
                getattr(created.labels(*labels) if labels else created, method)(value)
        except Exception:
            # For instance, the directory of the shared values was deleted. Messages are processed without metrics.
            self._failed = True
            logger.exception("Metrics are not exported")


exporter = Exporter()

_WORKER: Final = ("worker",)
RUNS: Final = Counter("housekeeping_runs_total", "Runs of workers and other actors that ended.", ("worker", "outcome"))
DURATION: Final = Histogram("housekeeping_run_duration_seconds", "Duration of runs, without skipped ones.", _WORKER)
ROWS: Final = Counter(
    "housekeeping_rows_total", "Row counts of runs, by the count's name in the worker's document.", ("worker", "result")
)
DATABASE_TIME: Final = Counter("housekeeping_database_seconds_total", "Time that runs waited for PostgreSQL.", _WORKER)
REDIS_TIME: Final = Counter("housekeeping_redis_seconds_total", "Time that runs waited for Redis.", _WORKER)
LAST_RUN: Final = Gauge("housekeeping_last_run_timestamp_seconds", "End of the last run that was not skipped.", _WORKER)
LAST_RUN_DURATION: Final = Gauge("housekeeping_last_run_duration_seconds", "Duration of the last run.", _WORKER)
LAST_RUN_ROWS: Final = Gauge("housekeeping_last_run_rows", "Row counts of the last run.", ("worker", "result"))
LAST_SUCCESS: Final = Gauge(
    "housekeeping_last_success_timestamp_seconds", "End of the last run that was done or reached a limit.", _WORKER
)
LAST_ATTEMPT: Final = Gauge(
    "housekeeping_last_attempt_timestamp_seconds",
    "When the last run began, or was skipped because of a pause or a missing confirmation.",
    _WORKER,
)
OPEN_RUN: Final = GaugeOfProcess(
    "housekeeping_open_run_timestamp_seconds", "When the process's oldest open run began; 0 if none is open.", _WORKER
)
WAITING_SINCE: Final = Gauge(
    "housekeeping_waiting_since_timestamp_seconds", "When a process started to consume the worker's messages.", _WORKER
)
BACKLOG: Final = Gauge(
    "housekeeping_backlog_rows", "Stale rows left after the last run, counted up to one more than the limit.", _WORKER
)
OLDEST: Final = Gauge(
    "housekeeping_oldest_stale_age_seconds",
    "Age of the oldest stale row after the last run; 0 if there was none.",
    _WORKER,
)
ALARM: Final = Gauge("housekeeping_alarm", "Whether the alert was active after the last run.", ("worker", "alarm"))
ALARM_LIMIT: Final = Gauge("housekeeping_alarm_limit", "Threshold of the alert.", ("worker", "alarm"))
WORKER_DATABASE: Final = Gauge(
    "housekeeping_worker_database", "1 for the database of the worker, if there are several.", ("worker", "database")
)
CLOCK_SKEW: Final = Gauge(
    "housekeeping_clock_skew_seconds",
    "How far this machine's clock was ahead of the database's (or Redis's, if that differs more) at the start of the "
    "last run; negative if behind.",
    _WORKER,
)
LEASES_REQUESTED: Final = Counter("housekeeping_leases_requested_total", "Attempts to acquire a lease.", _WORKER)
LEASES_HELD: Final = Counter(
    "housekeeping_leases_held_total", "Attempts to acquire a lease that had another holder.", _WORKER
)
LEASES_LOST: Final = Counter("housekeeping_leases_lost_total", "Leases lost before they were released.", _WORKER)
DEDUPLICATED: Final = Counter(
    "housekeeping_deduplicated_total", "Messages dropped as duplicates of a live message.", _WORKER
)
RETRIES: Final = Counter("housekeeping_retries_total", "Messages enqueued again after a failure.", _WORKER)
DEAD_LETTERS: Final = Counter("housekeeping_dead_letters_total", "Messages that became dead letters.", _WORKER)
TICKS_SENT: Final = Counter("housekeeping_ticks_sent_total", "Ticks whose message was sent.", _WORKER)
TICKS_MISSED: Final = Counter("housekeeping_ticks_missed_total", "Ticks whose message was not sent in time.", _WORKER)
LAST_TICK: Final = Gauge("housekeeping_last_tick_timestamp_seconds", "When a tick's message was last sent.", _WORKER)
SERVER_UNAVAILABLE: Final = GaugeOfProcess(
    "housekeeping_server_unavailable",
    "Whether the process could not reach Redis at its last heartbeat, or the database main when it last looked.",
    ("server",),
)
_PROCESS: Final = ("kind", "process")
PROCESS_HEARTBEAT: Final = Gauge(
    "housekeeping_process_heartbeat_timestamp_seconds",
    "When a worker or scheduler process last sent a heartbeat.",
    (*_PROCESS, "queues", "version"),
)
PROCESS_THREADS: Final = Gauge("housekeeping_process_threads", "Threads of a process that process messages.", _PROCESS)
PROCESS_BUSY_THREADS: Final = Gauge(
    "housekeeping_process_busy_threads",
    "Threads of a process that processed a message at its last heartbeat.",
    _PROCESS,
)
_QUEUE: Final = ("queue",)
QUEUE_MESSAGES: Final = Gauge(
    "housekeeping_queue_messages", "Messages of a queue: waiting or running, delayed, dead.", (*_QUEUE, "state")
)
QUEUE_OLDEST: Final = Gauge(
    "housekeeping_queue_oldest_message_age_seconds",
    "How long a queue's next message has waited; 0 if none does.",
    _QUEUE,
)
PAUSED: Final = Gauge("housekeeping_worker_paused", "Whether the worker is paused.", _WORKER)
OPEN_RUNS: Final = Gauge("housekeeping_worker_open_runs", "Open runs of the worker in the whole installation.", _WORKER)
SERVER_FULL: Final = Gauge(
    "housekeeping_server_full", "Whether a disk of the server, or the memory of Redis, is full.", ("server",)
)
LATE_ERASURES: Final = Gauge(
    "housekeeping_late_erasures", "Erasures that are not done HOUSEKEEPING_ERASURE_LATE_S after their request.", ()
)
INSTALLATION_READ: Final = Gauge(
    "housekeeping_installation_read_timestamp_seconds",
    "When a process of this page last read the queues, pauses, open runs, full servers and late erasures.",
    (),
)

#: Every metric of the library.
ALL: Final = tuple(value for value in list(vars().values()) if isinstance(value, Metric))


def report_tick_sent(worker: str) -> None:
    """Export that a tick of the worker was sent now."""
    TICKS_SENT.add(worker)
    LAST_TICK.set(time.time(), worker)


def report_tick_skipped(worker: str, tick: datetime, reason: str) -> None:
    """Log that a tick will not run."""
    logger.info("Tick ended", worker=worker, tick=tick, outcome="skipped", reason=reason)


def report_ticks_missed(worker: str, tick: datetime, missed: int, reason: str) -> None:
    """Log and export missed ticks, of which this one is the last."""
    logger.info("Tick ended", outcome="missed", reason=reason, worker=worker, tick=tick, missed=missed)
    TICKS_MISSED.add(worker, number=missed)
