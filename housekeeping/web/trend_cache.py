"""Cache of the trends that the charts show, which refresh themselves for every viewer."""

from __future__ import annotations

import threading
from typing import Final

from housekeeping.core.clock import SYSTEM_CLOCK, Clock
from housekeeping.database.connection import database
from housekeeping.sweeps.declaration import Sweep
from housekeeping.sweeps.insight.trends import INTERVALS, Range, Trends, read_trends

#: Trends are read so often within an interval: those of an hour every second, those of a week every three minutes.
_READS: Final = 60
_MAX_KEPT: Final = 100  # trends; those that were read first are removed


class TrendCache:
    """Cache of the trends of each range and worker. Thread-safe."""

    def __init__(self, sweeps: dict[str, Sweep], clock: Clock = SYSTEM_CLOCK) -> None:
        self._sweeps = sweeps
        self._clock = clock
        self._lock = threading.Lock()  # never held while something is read
        self._kept: dict[tuple[Range, str | None], tuple[Trends, float]] = {}  # with the time until which they are kept

    def read(self, length: Range, worker: str | None) -> Trends:
        """Return the trends of a worker, or of all workers if it is None. Old ones are read again.

        Trends that lack a database are not kept, so that it is back as soon as it answers.
        """
        key = length, worker
        with self._lock:
            kept = self._kept.get(key)
        if kept is not None and self._clock.monotonic() < kept[1]:
            return kept[0]
        sweep = self._sweeps.get(worker or "")
        names = tuple(database.by_name()) if sweep is None else (sweep.database,)
        trends = read_trends(names, self._sweeps.values(), length, self._clock.now(), worker)
        if not trends.unavailable:
            self._keep(key, trends, self._clock.monotonic() + INTERVALS[length][0].total_seconds() / _READS)
        return trends

    def _keep(self, key: tuple[Range, str | None], trends: Trends, until: float) -> None:
        with self._lock:
            self._kept.pop(key, None)
            self._kept[key] = trends, until
            while len(self._kept) > _MAX_KEPT:
                del self._kept[next(iter(self._kept))]
