"""Application whose actor charges in its own database: in a test's process, or in one that is killed at a point.

``python -m tests.integration.middleware.charging POINT`` runs the message on stdin and dies at that point.
``CHARGES_URL`` is the URL of its own connection.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from contextlib import closing
from typing import Any

import dramatiq
import psycopg2
from dramatiq import Actor, Broker, Message, MessageProxy, Middleware

import housekeeping
from housekeeping import Settings
from tests.integration.middleware.applications import installed
from tests.integration.middleware.step_worker import StepWorker

#: Points at which a worker is killed, in order. At the last one, all but the library's end of the message is done.
POINTS = ("started", "recorded", "charged", "committed", "returned")
Reach = Callable[[str], object]


class Returned(Middleware):
    """Middleware of the application that reaches the point after the actor's return."""

    def __init__(self, reach: Reach) -> None:
        self._reach = reach

    def after_process_message(
        self, broker: Broker, message: MessageProxy, *, result: Any = None, exception: BaseException | None = None
    ) -> None:
        self._reach("returned")


def declared(broker: Broker, url: str, reach: Reach = lambda point: None, **options: Any) -> Actor[..., int]:
    """Declare an actor that charges an order in a transaction of psycopg2."""
    broker.add_middleware(Returned(reach))

    @dramatiq.actor(broker=broker, **{"idempotent": True, "deduplicate": None, **options})
    def charge(order: int) -> int:
        reach("started")
        with closing(psycopg2.connect(url)) as own:
            with own, own.cursor() as cursor:
                housekeeping.complete_in(own, result=order)
                reach("recorded")
                cursor.execute("INSERT INTO charges (order_id) VALUES (%s)", (order,))
                reach("charged")
            reach("committed")
        return order

    return charge


def die_at(fatal: str) -> Reach:
    """Return a function that kills this process when it reaches the point."""

    def reach(point: str) -> None:
        if point == fatal:
            os.kill(os.getpid(), signal.SIGKILL)

    return reach


if __name__ == "__main__":
    broker = installed(Settings.load())
    declared(broker, os.environ["CHARGES_URL"], die_at(sys.argv[1]))
    StepWorker(broker).run(MessageProxy(Message.decode(sys.stdin.buffer.read())))
