"""Schedule for tests that compare fired ticks, runs and the ledger."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import dramatiq
from dramatiq import MessageProxy
from dramatiq.brokers.redis import RedisBroker

from housekeeping import Settings
from tests.integration.middleware.applications import installed
from tests.integration.middleware.step_worker import StepWorker
from tests.internals.core import Cron, shared_redis
from tests.internals.ledger import Run


class Killed(BaseException):
    """Simulated kill of a process: none of its code runs afterward."""


class Account:
    """Schedulers and workers of one plain actor, ``swept``, with the ticks that ran and were recorded."""

    def __init__(self, settings: Settings, schedule: str, **options: Any) -> None:
        self.settings = settings
        self.schedule = schedule
        self._options = options
        self.runs: Counter[datetime] = Counter()
        #: Exceptions of the next runs; `None` is a run that succeeds.
        self.failures: Iterator[Exception | None] = iter(())
        self._in_hand = ""

    def process(self) -> RedisBroker:
        """Return the broker of a process that has just started, with nothing in memory."""
        broker = installed(self.settings)

        @dramatiq.actor(broker=broker, actor_name="swept", schedule=self.schedule, **self._options)
        def swept() -> None:
            self.runs[datetime.fromisoformat(self._in_hand)] += 1
            if failure := next(self.failures, None):
                raise failure

        return broker

    def drain(self) -> None:
        """Run every waiting message in a worker."""
        step_worker = StepWorker(self.process())
        while (message := step_worker.fetch()) is not None:
            self._run(step_worker, message)

    def run(self, message: MessageProxy) -> None:
        """Run the given message in a worker."""
        self._run(StepWorker(self.process()), message)

    def come_due(self) -> None:
        """Run retries at their due time until none is left."""
        step_worker = StepWorker(self.process())
        step_worker.come_due()
        while (message := step_worker.fetch()) is not None:
            self._run(step_worker, message)
            step_worker.come_due()

    def _run(self, step_worker: StepWorker, message: MessageProxy) -> None:
        self._in_hand = message.options["tick"]
        step_worker.run(message)

    def nominal(self, after: datetime, until: datetime) -> set[datetime]:
        """Return the ticks after one time, up to and including another."""
        return set(Cron(self.schedule, self.settings.timezone).ticks(after, until))

    @property
    def ran(self) -> set[datetime]:
        assert all(times == 1 for times in self.runs.values()), "a tick ran more than once"
        return set(self.runs)

    @property
    def recorded(self) -> set[datetime]:
        """Return the ticks that have an outcome of their own."""
        own: Any = Run.select(Run.tick).where(Run.worker == "swept", Run.outcome != "missed").tuples()
        ticks = [tick for (tick,) in own]
        assert len(ticks) == len(set(ticks)), "a tick has two outcomes"
        return set(ticks)

    @property
    def missed(self) -> int:
        """Return the number of ticks that the ledger records as missed."""
        gaps: Any = Run.select(Run.counts).where(Run.worker == "swept", Run.outcome == "missed").tuples()
        return sum(counts["missed"] for (counts,) in gaps)


def expire_claims(namespace: str) -> None:
    """Expire the claims of a dead scheduler."""
    client = shared_redis.get()
    for key in list(client.scan_iter(match=f"{namespace}:tick_claim:*")):
        assert 0 < client.pttl(key) <= 10_000, "a claim that would block for longer than seconds"
        client.delete(key)


def utc(text: str) -> datetime:
    """Parse an ISO time, as UTC unless it has an offset."""
    at = datetime.fromisoformat(text)
    return at if at.tzinfo else at.replace(tzinfo=UTC)
