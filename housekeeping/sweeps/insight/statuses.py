"""Status of many workers, so that a slow or locked table delays only its own worker."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from typing import Any, Final

from housekeeping.database.connection import database
from housekeeping.sweeps.declaration import Sweep
from housekeeping.sweeps.insight.status import WorkerStatus, worker_status

#: Until then, all is read on this thread's connection: enough for the usual installation, where nothing is slow.
_ALONE_S: Final = 1.0
#: A reader waits no longer for the counts of all workers. The rest of a status is always read.
_BUDGET_S: Final = 10.0
_THREADS: Final = 4  # each with a connection of its own


def worker_statuses(sweeps: Sequence[Sweep], now: datetime, zone: Any) -> list[WorkerStatus]:
    """Return the status of each worker, in order; all are of the current database.

    Raises:
      peewee.PeeweeException, DatabaseUnavailable: The database does not answer.
    """
    began = time.monotonic()
    found: list[WorkerStatus] = []
    for sweep in sweeps:
        if time.monotonic() - began > _ALONE_S:
            break
        found.append(worker_status(sweep, now, zone))
    left, name = sweeps[len(found) :], database.selected

    def read(sweep: Sweep) -> WorkerStatus:
        with database.using(name):
            try:
                return worker_status(sweep, now, zone, count=time.monotonic() - began < _BUDGET_S)
            finally:
                database.close()

    if left:
        with ThreadPoolExecutor(_THREADS, thread_name_prefix="housekeeping-status") as pool:
            found += pool.map(read, left)
    return found
