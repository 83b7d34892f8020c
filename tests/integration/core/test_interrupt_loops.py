"""Many interrupts, each at another moment, leave no lock locked and no connection out of step."""

from __future__ import annotations

import itertools
import queue
import random
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import prometheus_client
import pytest
import redis
from psycopg2.extensions import TRANSACTION_STATUS_IDLE

from housekeeping import ExclusiveLease
from tests.internals.core import Counter, Exporter, Histogram, LostLease, interrupt, run_interruptibly
from tests.internals.database import Database

PATIENCE_S = 20
TIMES = [pytest.param(40, id="some"), pytest.param(1000, id="thousand", marks=pytest.mark.slow)]
#: Something that threads do again and again, given a number that is new each time.
Step = Callable[[int], object]


class Repeating(threading.Thread):
    """Repeats a step until it is interrupted, so many times.

    Attributes:
      ends: One item for each time: None, or the error that came instead of the interrupt.
    """

    def __init__(self, step: Step, after: Callable[[], object], times: int) -> None:
        super().__init__(daemon=True)
        self.ends: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
        self._step, self._after, self._times = step, after, times

    def run(self) -> None:
        numbers = itertools.count()
        for _ in range(self._times):
            try:
                run_interruptibly(self._repeat, numbers)
            except LostLease:
                self._end()
            except BaseException as error:
                self.ends.put(error)

    def _repeat(self, numbers: Iterator[int]) -> None:
        for number in numbers:
            self._step(number)

    def _end(self) -> None:
        try:
            self._after()
            self.ends.put(None)
        except BaseException as error:
            self.ends.put(error)


def interrupt_often(step: Step, times: int, after: Callable[[], object] = lambda: None) -> None:
    """Interrupt a thread so many times while it repeats a step; then let another one do the step."""
    pause, repeating = random.Random(7), Repeating(step, after, times)
    repeating.start()
    for _ in range(times):
        time.sleep(pause.random() * 0.003)
        interrupt_when_inside(repeating.ident or 0)
        error = repeating.ends.get(timeout=PATIENCE_S)
        if error is not None:
            raise error
    repeating.join(PATIENCE_S)
    other = threading.Thread(target=step, args=(-1,), daemon=True)
    other.start()
    other.join(PATIENCE_S)
    assert not other.is_alive()


def interrupt_when_inside(thread_id: int) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not interrupt(thread_id, LostLease):
        assert time.monotonic() < deadline
        time.sleep(0.0001)


@pytest.mark.parametrize("times", TIMES)
def test_interrupts_of_a_measuring_thread_leave_metrics_unlocked(times: int) -> None:
    exporter = Exporter({"registry": prometheus_client.CollectorRegistry()})
    counter, duration = Counter("steps_total", "", ("worker",)), Histogram("duration", "", ("worker",))

    def step(number: int) -> None:
        exporter.measure((counter, (f"w{number % 10}",), "inc", 1))
        exporter.measure((duration, ("w",), "observe", 0.5))
        sum(range(1000))  # the work that is measured

    interrupt_often(step, times)


@pytest.mark.parametrize("times", TIMES)
def test_interrupts_of_redis_commands_mix_up_no_answers(times: int, redis_client: redis.Redis) -> None:
    script: Any = redis_client.register_script("return ARGV[1]")

    def step(number: int) -> None:
        assert redis_client.echo(str(number)) == str(number).encode()
        assert script(args=[number]) == str(number).encode()

    interrupt_often(step, times)


@pytest.mark.parametrize("times", TIMES)
def test_interrupts_of_statements_leave_no_transaction_open(times: int, postgres: Database) -> None:
    postgres.execute_sql("CREATE TABLE interrupted (number bigint)")

    def step(number: int) -> None:
        with postgres.atomic():
            postgres.execute_sql("INSERT INTO interrupted VALUES (%s)", (number,))
            assert list(postgres.execute_sql("SELECT %s", (number,))) == [(number,)]
            postgres.execute_sql("INSERT INTO interrupted VALUES (%s)", (number,))

    def after() -> None:
        assert not postgres.in_transaction()
        assert postgres.connection().info.transaction_status == TRANSACTION_STATUS_IDLE

    interrupt_often(step, times, after)

    halves = "SELECT count(*) FROM (SELECT FROM interrupted GROUP BY number HAVING count(*) <> 2) AS halves"
    assert list(postgres.execute_sql(halves)) == [(0,)]


@pytest.mark.parametrize("times", TIMES)
def test_interrupts_of_a_thread_with_leases_leave_their_renewal_working(
    times: int, postgres: Database, redis_client: redis.Redis
) -> None:
    def step(number: int) -> None:
        with ExclusiveLease(f"interrupted/{number}", timedelta(minutes=1), redis_client) as lease:
            lease.check()

    interrupt_often(step, times)
