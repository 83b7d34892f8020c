"""The metrics, counted in whatever process they arise; where nothing is exported they cost nothing.

prometheus-client decides when it is first imported whether its values are shared between processes, and
Dramatiq's middleware prepares that when a worker process boots. So this module never imports it first: whoever
exports metrics has imported it, and until then what was measured waits here.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Final

from housekeeping.core.telemetry.logs import logger as named_logger

logger = named_logger(__name__)

_OBSERVED: Final = 1000  # durations that wait for an exporter; the oldest are given up first
_MOST_WAITING: Final = 10_000  # labelled values that wait; beyond them, new ones are given up


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric as it is exported.

    Attributes:
      name: As Prometheus has it.
      text: What it is, for a person.
      labels: The names of its labels.
    """

    name: str
    text: str
    labels: tuple[str, ...]
    kind: ClassVar[str]

    def made(self, prometheus: Any, **more: Any) -> Any:
        """The same in prometheus-client."""
        return getattr(prometheus, self.kind)(self.name, self.text, self.labels, **more)


class Counter(Metric):
    """What only goes up, summed over all processes."""

    __slots__ = ()
    kind = "Counter"

    def add(self, *labels: str, number: float = 1) -> None:
        """Count; 0 makes it known before anything is counted. Never raises."""
        _exporter.take(self, labels, lambda before: (before or 0) + number)

    def give(self, child: Any, waiting: Any) -> None:
        child.inc(waiting)


class Gauge(Metric):
    """What goes up and down; of several processes, the one that said so last."""

    __slots__ = ()
    kind = "Gauge"

    def made(self, prometheus: Any, **more: Any) -> Any:
        return Metric.made(self, prometheus, **more, multiprocess_mode="mostrecent")

    def set(self, value: float, *labels: str) -> None:
        """Say how it stands now. Never raises."""
        _exporter.take(self, labels, lambda before: value)

    def give(self, child: Any, waiting: Any) -> None:
        child.set(waiting)


class Histogram(Metric):
    """Seconds, spread over buckets that include the limits of the workers' documents."""

    __slots__ = ()
    kind = "Histogram"
    BUCKETS: ClassVar = (0.05, 0.25, 1, 5, 15, 30, 60, 120, 250, 600, 1200, 1800, 3600)

    def made(self, prometheus: Any, **more: Any) -> Any:
        return Metric.made(self, prometheus, **more, buckets=self.BUCKETS)

    def observe(self, seconds: float, *labels: str) -> None:
        """Add one. Never raises."""
        _exporter.take(self, labels, lambda before: [*(before or [])[1 - _OBSERVED :], seconds])

    def give(self, child: Any, waiting: Any) -> None:
        for seconds in waiting:
            child.observe(seconds)


class _Exporter:
    """Hands on to prometheus-client, once somebody has imported it.

    Parameters:
      given: To prometheus-client with each metric, such as a registry.
    """

    def __init__(self, given: Mapping[str, Any] | None = None) -> None:
        self._given = given or {}
        self._begin()
        self._made: dict[Metric, Any] = {}
        self._failed = False
        os.register_at_fork(after_in_child=self._begin)  # the parent exports what it counted itself

    def _begin(self) -> None:
        self._lock = threading.Lock()
        self._waiting: dict[tuple[Any, tuple[str, ...]], Any] = {}

    def take(self, metric: Metric, labels: tuple[str, ...], changed: Any) -> None:
        with self._lock:
            if (metric, labels) in self._waiting or len(self._waiting) < _MOST_WAITING:
                self._waiting[metric, labels] = changed(self._waiting.get((metric, labels)))
            self._hand_over()

    def export_pending(self) -> None:
        with self._lock:
            self._hand_over()

    def _hand_over(self) -> None:
        prometheus: Any = sys.modules.get("prometheus_client")
        # While another thread is importing it, it is there without its names.
        if self._failed or not hasattr(prometheus, "generate_latest"):
            return
        try:
            while self._waiting:
                (metric, labels), waiting = self._waiting.popitem()
                if metric not in self._made:
                    self._made[metric] = metric.made(prometheus, **self._given)
                child = self._made[metric]
                metric.give(child.labels(*labels) if labels else child, waiting)
        except Exception:
            # For instance a folder of shared values that is gone. A metric is no reason for a message not to be sent.
            self._failed = True
            logger.exception("Metrics are not exported")


_exporter = _Exporter()

_WORKER: Final = ("worker",)
RUNS: Final = Counter("housekeeping_runs_total", "Runs of workers and other actors that ended.", ("worker", "outcome"))
DURATION: Final = Histogram("housekeeping_run_duration_seconds", "How long runs took; not those skipped.", _WORKER)
ROWS: Final = Counter(
    "housekeeping_rows_total", "What runs counted, by the count's name in the worker's document.", ("worker", "result")
)
DATABASE_TIME: Final = Counter("housekeeping_database_seconds_total", "Time runs waited for PostgreSQL.", _WORKER)
REDIS_TIME: Final = Counter("housekeeping_redis_seconds_total", "Time runs waited for Redis.", _WORKER)
LAST_RUN: Final = Gauge("housekeeping_last_run_timestamp_seconds", "When a run last ended that had begun.", _WORKER)
LAST_RUN_DURATION: Final = Gauge("housekeeping_last_run_duration_seconds", "How long that run took.", _WORKER)
LAST_RUN_ROWS: Final = Gauge("housekeeping_last_run_rows", "What that run counted.", ("worker", "result"))
LAST_SUCCESS: Final = Gauge(
    "housekeeping_last_success_timestamp_seconds", "When a run last did its work, to the end or its limits.", _WORKER
)
LAST_ATTEMPT: Final = Gauge(
    "housekeeping_last_attempt_timestamp_seconds", "When a run last ended, skipped ones too.", _WORKER
)
WAITING_SINCE: Final = Gauge(
    "housekeeping_waiting_since_timestamp_seconds", "When a process began to take the worker's messages.", _WORKER
)
BACKLOG: Final = Gauge(
    "housekeeping_backlog_rows", "Records that waited after the last run, counted up to the limit and one.", _WORKER
)
OLDEST: Final = Gauge(
    "housekeeping_oldest_stale_age_seconds",
    "Age of the oldest of them; 0: none waited.",
    _WORKER,
)
ALARM: Final = Gauge("housekeeping_alarm", "Whether the last run's end set the alarm off.", ("worker", "alarm"))
ALARM_LIMIT: Final = Gauge("housekeeping_alarm_limit", "What must not be exceeded, by settings.", ("worker", "alarm"))
CLOCK_SKEW: Final = Gauge(
    "housekeeping_clock_skew_seconds",
    "How far this machine's clock was ahead of the database's when the last run began; negative: behind.",
    _WORKER,
)
LEASES_REQUESTED: Final = Counter("housekeeping_leases_requested_total", "Leases asked for.", _WORKER)
LEASES_HELD: Final = Counter("housekeeping_leases_held_total", "Leases that were held elsewhere.", _WORKER)
LEASES_LOST: Final = Counter("housekeeping_leases_lost_total", "Leases lost while they were held.", _WORKER)
DEDUPLICATED: Final = Counter(
    "housekeeping_deduplicated_total", "Messages dropped because one like them was live.", _WORKER
)
RETRIES: Final = Counter("housekeeping_retries_total", "Messages enqueued once more after a failure.", _WORKER)
DEAD_LETTERS: Final = Counter("housekeeping_dead_letters_total", "Messages that were given up.", _WORKER)
TICKS_SENT: Final = Counter("housekeeping_ticks_sent_total", "Ticks whose message was sent.", _WORKER)
TICKS_MISSED: Final = Counter("housekeeping_ticks_missed_total", "Ticks that nobody sent in time.", _WORKER)
LAST_TICK: Final = Gauge("housekeeping_last_tick_timestamp_seconds", "When a tick was last sent.", _WORKER)
_PROCESS: Final = ("kind", "process")
PROCESS_HEARTBEAT: Final = Gauge(
    "housekeeping_process_heartbeat_timestamp_seconds",
    "When a worker or scheduler process last sent a heartbeat.",
    (*_PROCESS, "queues", "version"),
)
PROCESS_THREADS: Final = Gauge("housekeeping_process_threads", "Threads of a process that run messages.", _PROCESS)
PROCESS_BUSY_THREADS: Final = Gauge(
    "housekeeping_process_busy_threads", "Threads of a process that ran a message at its last heartbeat.", _PROCESS
)

#: Every metric of the library.
ALL: Final = tuple(value for value in list(vars().values()) if isinstance(value, Metric))


def count_deduplicated(worker: str) -> None:
    """Count a message that was dropped as a duplicate; never raises."""
    DEDUPLICATED.add(worker)


def export_pending() -> None:
    """Give prometheus-client what was measured before it was imported; for an exporter, before it reads. Never raises.

    Every further measurement does the same.
    """
    _exporter.export_pending()
