"""Prefetch: a worker process takes no more messages than it has threads."""

from __future__ import annotations

import dramatiq.worker
from dramatiq import Broker, Middleware, Worker


class Prefetch(Middleware):
    """Middleware that limits the messages a process takes from each queue to one per thread.

    Dramatiq takes two per thread. The second then waits behind the first one, which may be a sweep of many minutes,
    while another process is idle. From queues of delayed messages a process still takes many, because they keep no
    thread busy.

    Dramatiq's ``dramatiq_queue_prefetch`` in the environment wins.
    """

    def before_worker_boot(self, broker: Broker, worker: Worker) -> None:
        if not dramatiq.worker.QUEUE_PREFETCH:
            worker.queue_prefetch = worker.worker_threads
