"""Worker process that owes a rerun and is killed in its run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from dramatiq import Actor, MessageProxy
from dramatiq.brokers.redis import RedisBroker

from tests.faults import Where, elsewhere, exchanges, instead_of_pauses
from tests.integration.middleware.deduplication.deduplicated import declared, executed
from tests.integration.middleware.step_worker import StepWorker

ONCE: Final = executed(if_deduplicated="reschedule_once")


def run_all(step_worker: StepWorker) -> int:
    """Run waiting messages until none is left; return their number."""
    for number in range(10):
        message = step_worker.fetch()
        if message is None:
            return number
        step_worker.run(message)
    raise AssertionError("there is no end to it")


class EndingBadly:
    """Worker whose first run meets a duplicate and then fails at the exchange with this number."""

    def __init__(self, broker: RedisBroker, step_worker: StepWorker) -> None:
        self.reads: list[str] = []
        self.completed = False  # what a redelivered sweep reads in its ledger
        self.in_hand: bytes = b""
        self._broker = broker
        self._hands = step_worker
        self._end: Callable[[], None] | None = None
        self.work: Actor[..., Any] = declared(broker, [], self._function, **ONCE)
        self.work.send()
        run_all(step_worker)

    def _function(self) -> None:
        if self.completed:
            return
        self.reads.append("read")
        if self._end is not None:
            end, self._end = self._end, None
            elsewhere(self.work.send)()
            self.reads.clear()
            end()

    def end(self, number: int, where: Where, fault: Callable[[], None], times: int = 1) -> MessageProxy:
        """Run a message until it fails in this way."""
        self.work.send()
        message = self._hands.take()
        self.in_hand = message.encode()
        with exchanges() as made, instead_of_pauses():

            def arrange() -> None:
                for more in range(times):
                    made.at(made.total + number + more, where, fault)

            self._end = arrange
            self._hands.run(message)
        return message
