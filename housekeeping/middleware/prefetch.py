"""Lets a worker process take no more messages than it has threads for."""

from __future__ import annotations

import dramatiq.worker
from dramatiq import Broker, Middleware, Worker


class Prefetch(Middleware):
    """Middleware that sets how many messages a process takes from each queue: one a thread.

    Dramatiq takes two a thread. The second then waits behind the first one, which may be a sweep of many minutes,
    while another process has nothing to do. From queues of delayed messages a process still takes many: they
    are in nobody's way.

    Dramatiq's ``dramatiq_queue_prefetch`` in the environment wins.
    """

    def before_worker_boot(self, broker: Broker, worker: Worker) -> None:
        if not dramatiq.worker.QUEUE_PREFETCH:
            worker.queue_prefetch = worker.worker_threads
