"""Counts for Prometheus, in whatever process they arise; where nothing is exported they cost nothing.

prometheus-client decides when it is first imported whether its values are shared between processes, and
Dramatiq's middleware prepares that when a worker process boots. So this module never imports it first: whoever
exports metrics has imported it, and until then counts wait here.
"""

from __future__ import annotations

import os
import sys
import threading
from collections import Counter
from typing import Any, Final

from housekeeping.foundation.logs import logger as named_logger

logger = named_logger(__name__)

DEDUPLICATED: Final = "housekeeping_deduplicated_total"


class _Deduplicated:
    """How many messages of each worker were dropped as duplicates."""

    def __init__(self) -> None:
        self._begin()
        self._metric: Any = None
        self._failed = False
        os.register_at_fork(after_in_child=self._begin)  # the parent exports what it counted itself

    def _begin(self) -> None:
        self._lock = threading.Lock()
        self._waiting: Counter[str] = Counter()

    def count(self, worker: str) -> None:
        with self._lock:
            self._waiting[worker] += 1
            self._hand_over()

    def hand_over(self) -> None:
        with self._lock:
            self._hand_over()

    def _hand_over(self) -> None:
        prometheus: Any = sys.modules.get("prometheus_client")
        # While another thread is importing it, it is there without its names.
        if self._failed or not hasattr(prometheus, "generate_latest"):
            return
        try:
            if self._metric is None:
                self._metric = prometheus.Counter(
                    DEDUPLICATED.removesuffix("_total"), "Messages dropped because one like them was live.", ["worker"]
                )
            while self._waiting:
                worker, number = self._waiting.popitem()
                self._metric.labels(worker).inc(number)
        except Exception:
            # For instance a folder of shared values that is gone. A metric is no reason for a message not to be sent.
            self._failed = True
            logger.exception("Metrics of deduplication are not exported")


_deduplicated: Final = _Deduplicated()


def count_deduplicated(worker: str) -> None:
    """Count a message that was dropped as a duplicate, as `housekeeping_deduplicated_total{worker}`; never raises."""
    _deduplicated.count(worker)


def hand_over() -> None:
    """Give prometheus-client what was counted before it was imported; for an exporter, before it reads. Never raises.

    Every further count does the same.
    """
    _deduplicated.hand_over()
