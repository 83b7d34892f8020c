"""What one worker or scheduler process does for the installation every half minute, so that nobody needs to look.

It evaluates the alerts, and exports what no run knows: queues, pauses and open runs.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from math import nan
from typing import Final

from housekeeping.brokers import QueueLengths
from housekeeping.core import telemetry
from housekeeping.core.settings import Settings
from housekeeping.insight.status import Snapshot, SnapshotReader, WorkerStatus
from housekeeping.ledger.alerts import claim_evaluation
from housekeeping.sweeps.declaration import Sweep

_STATES: Final = ("waiting", "delayed", "dead")


class InstallationWatch:
    """Look at the installation by one of its processes at a time."""

    def __init__(self, settings: Settings, sweeps: dict[str, Sweep]) -> None:
        self._sweeps = sweeps
        self._reader = SnapshotReader(settings, sweeps, with_progress=False)
        self._last: Snapshot | None = None

    def look(self) -> None:
        """Read the installation, unless another process has done so within half a minute.

        Raises:
          DatabaseUnavailable: The database ``main`` does not answer. What was exported becomes unknown.
        """
        try:
            if not claim_evaluation():
                return
        except Exception:
            self._export(None)
            raise
        self._last = self._reader.read(self._last)
        self._export(self._last)

    def _export(self, found: Snapshot | None) -> None:
        """Export what was read; what could not be read is NaN, as a gauge cannot be taken back."""
        for queue in {sweep.queue for sweep in self._sweeps.values()}:
            lengths = found.queues.get(queue) if found and found.read_at.get("queues") == found.at else None
            for state, number in zip(_STATES, _numbers(lengths), strict=True):
                telemetry.QUEUE_MESSAGES.set(number, queue, state)
            telemetry.QUEUE_OLDEST.set(_oldest_s(lengths, found), queue)
        for name, sweep in self._sweeps.items():
            is_read = found is not None and sweep.database in found.clocks
            status = found.statuses.get(name) if found and is_read else None
            telemetry.PAUSED.set(nan if status is None else _is_paused(status), name)
            telemetry.OPEN_RUNS.set(nan if status is None or status.open_runs is None else status.open_runs, name)
        if found is not None:
            telemetry.INSTALLATION_READ.set(time.time())


def _numbers(lengths: QueueLengths | None) -> Iterator[float]:
    return (nan if lengths is None else getattr(lengths, state) for state in _STATES)


def _oldest_s(lengths: QueueLengths | None, found: Snapshot | None) -> float:
    if lengths is None or found is None:
        return nan
    if lengths.oldest_at is None:
        # The messages may all be running. RabbitMQ tells no time at all.
        return nan if lengths.waiting else 0.0
    return max(0.0, (found.at - lengths.oldest_at).total_seconds())


def _is_paused(status: WorkerStatus) -> bool:
    return status.switch is not None and status.switch.state == "paused"
