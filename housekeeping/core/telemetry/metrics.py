"""Every metric of the library, measured in any process and exported by prometheus-client where it is imported.

prometheus-client decides at its first import whether processes share their values, and Dramatiq's middleware prepares
that when a worker process boots. An earlier import, caused by a measurement, would lose the values of that process. So
this module never imports it. Measurements are kept here until an exporter has imported it.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Final

from housekeeping.core.telemetry.logs import logger as named_logger

logger = named_logger(__name__)

_MAX_PENDING_DURATIONS: Final = 1000  # of each histogram; the oldest are dropped
_MAX_PENDING: Final = 10_000  # combinations of metric and labels; new ones are dropped


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

    def create(self, prometheus: Any, **options: Any) -> Any:
        """Return the metric of prometheus-client."""
        return getattr(prometheus, self.kind)(self.name, self.text, self.labels, **options)


class Counter(Metric):
    """Value that only increases, summed over all processes."""

    __slots__ = ()
    kind = "Counter"

    def add(self, *labels: str, number: float = 1) -> None:
        """Increase the counter; 0 exports it before the first count. Never raises."""
        exporter.measure(self, labels, lambda pending: (pending or 0) + number)

    def export(self, child: Any, pending: Any) -> None:
        child.inc(pending)


class Gauge(Metric):
    """Value that increases and decreases; the latest one of all processes counts."""

    __slots__ = ()
    kind = "Gauge"

    def create(self, prometheus: Any, **options: Any) -> Any:
        return Metric.create(self, prometheus, **options, multiprocess_mode="mostrecent")

    def set(self, value: float, *labels: str) -> None:
        """Set the value. Never raises."""
        exporter.measure(self, labels, lambda pending: value)

    def export(self, child: Any, pending: Any) -> None:
        child.set(pending)


class Histogram(Metric):
    """Durations in seconds, in buckets that include the limits of the workers' documents."""

    __slots__ = ()
    kind = "Histogram"
    BUCKETS: ClassVar = (0.05, 0.25, 1, 5, 15, 30, 60, 120, 250, 600, 1200, 1800, 3600)

    def create(self, prometheus: Any, **options: Any) -> Any:
        return Metric.create(self, prometheus, **options, buckets=self.BUCKETS)

    def observe(self, seconds: float, *labels: str) -> None:
        """Add a duration. Never raises."""
        exporter.measure(self, labels, lambda pending: [*(pending or [])[1 - _MAX_PENDING_DURATIONS :], seconds])

    def export(self, child: Any, pending: Any) -> None:
        for seconds in pending:
            child.observe(seconds)


class Exporter:
    """Passes measurements to prometheus-client, and keeps them while it is not imported.

    Parameters:
      options: Passed to prometheus-client with each metric, such as a registry.
    """

    def __init__(self, options: Mapping[str, Any] | None = None) -> None:
        self._options = options or {}
        self._reset()
        self._created: dict[Metric, Any] = {}
        self._failed = False
        os.register_at_fork(after_in_child=self._reset)  # the parent exports its own measurements

    def _reset(self) -> None:
        self._lock = threading.Lock()
        self._pending: dict[tuple[Any, tuple[str, ...]], Any] = {}

    def measure(self, metric: Metric, labels: tuple[str, ...], update: Callable[[Any], Any]) -> None:
        """Replace the pending value of a metric by its update, and export all pending values if possible."""
        with self._lock:
            if (metric, labels) in self._pending or len(self._pending) < _MAX_PENDING:
                self._pending[metric, labels] = update(self._pending.get((metric, labels)))
            self._export()

    def export_pending(self) -> None:
        with self._lock:
            self._export()

    def _export(self) -> None:
        prometheus: Any = sys.modules.get("prometheus_client")
        # While another thread imports the module, it exists without its names.
        if self._failed or not hasattr(prometheus, "generate_latest"):
            return
        try:
            while self._pending:
                (metric, labels), pending = self._pending.popitem()
                if metric not in self._created:
                    self._created[metric] = metric.create(prometheus, **self._options)
                child = self._created[metric]
                metric.export(child.labels(*labels) if labels else child, pending)
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
    "housekeeping_last_attempt_timestamp_seconds", "End of the last run, skipped ones included.", _WORKER
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
    "How far this machine's clock was ahead of the database's at the start of the last run; negative if behind.",
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

#: Every metric of the library.
ALL: Final = tuple(value for value in list(vars().values()) if isinstance(value, Metric))


def export_pending() -> None:
    """Export measurements from before prometheus-client was imported; never raises.

    Every further measurement does the same. An exporter calls this before it serves its first page.
    """
    exporter.export_pending()
