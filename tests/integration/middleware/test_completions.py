"""Completions that actors record in their own transaction: one effect, whatever is lost or killed."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, closing, contextmanager
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import dramatiq
import psycopg
import psycopg2
import pytest
import redis
from dramatiq.middleware.asyncio import AsyncIO
from dramatiq.results import Results
from dramatiq.results.backends import StubBackend
from psycopg2.extensions import connection as Connection

import housekeeping
from housekeeping import Settings
from tests.integration.middleware import charging
from tests.integration.middleware.applications import close_all, installed, queued
from tests.integration.middleware.step_worker import StepWorker, delivered_again
from tests.internals.core import HousekeepingError
from tests.internals.database import Database, database
from tests.internals.ledger import Completion

PATIENCE_S: Final = 60


@pytest.fixture
def broker(settings: Settings, postgres: Database, admin: Connection, redis_client: redis.Redis) -> Iterator[Any]:
    """Yield a broker with the library's middleware, whose application has a table of charges."""
    with admin.cursor() as cursor:
        cursor.execute("CREATE TABLE charges (order_id bigint NOT NULL)")
    yield installed(settings)
    close_all()
    database.initialize(postgres)


@pytest.fixture
def charges(broker: Any, admin: Connection) -> Callable[[], list[int]]:
    """Return a function that returns the charged orders."""

    def read() -> list[int]:
        with admin.cursor() as cursor:
            cursor.execute("SELECT order_id FROM charges ORDER BY order_id")
            return [order for (order,) in cursor]

    return read


@pytest.fixture
def empty_redis(redis_client: redis.Redis, settings: Settings) -> Callable[[], None]:
    """Return a function after which Redis knows of no completion and no running message."""

    def empty() -> None:
        for key in [*redis_client.scan_iter(match=f"{settings.namespace}:*", count=1000)]:
            if b":done:" in key or b":running:" in key or b":retried:" in key:
                redis_client.delete(key)

    return empty


@pytest.mark.parametrize(
    "point", [pytest.param(each, marks=[] if each == "committed" else [pytest.mark.slow]) for each in charging.POINTS]
)
def test_charge_happens_once_wherever_the_worker_is_killed(
    broker: Any,
    application_url: str,
    environment: dict[str, str],
    charges: Callable[[], list[int]],
    empty_redis: Callable[[], None],
    point: str,
) -> None:
    charge = charging.declared(broker, application_url)
    charge.send_with_options(args=(7,), idempotency_key="order-7")
    step_worker = StepWorker(broker)
    message = step_worker.take()

    killed = subprocess.run(
        [sys.executable, "-m", charging.__name__, point],
        input=message.encode(),
        env=environment | {"CHARGES_URL": application_url},
        timeout=60,
    )
    empty_redis()  # the mark of the killed run has expired
    step_worker.run(message)

    assert killed.returncode == -9
    assert charges() == [7]
    assert [(row.message_id, bytes(row.result or b"")) for row in Completion.select()] == [(message.message_id, b"7")]
    assert queued(broker) == queued(broker, "default.DQ") == queued(broker, "default.XQ") == []


def test_message_found_done_in_the_database_is_then_done_in_redis(
    broker: Any, settings: Settings, application_url: str, redis_client: redis.Redis, empty_redis: Callable[[], None]
) -> None:
    charge = charging.declared(broker, application_url)
    charge.send(7)
    step_worker = StepWorker(broker)
    message = step_worker.take()
    step_worker.run(message)
    empty_redis()

    step_worker.run(delivered_again(message))

    (completion,) = redis_client.scan_iter(match=f"{settings.namespace}:done:*", count=1000)
    assert redis_client.get(completion) == message.message_id.encode()


def test_second_message_with_the_key_charges_nothing_and_has_the_result(  # I3
    broker: Any,
    settings: Settings,
    application_url: str,
    charges: Callable[[], list[int]],
    empty_redis: Callable[[], None],
) -> None:
    backend = StubBackend(namespace=settings.namespace)
    broker.add_middleware(Results(backend=backend, store_results=True))
    charge = charging.declared(broker, application_url)
    step_worker = StepWorker(broker)
    charge.send_with_options(args=(7,), idempotency_key="order")
    second = charge.send_with_options(args=(8,), idempotency_key="order")
    step_worker.run()
    empty_redis()

    step_worker.run()

    assert charges() == [7]
    assert backend.get_result(second) == 7


@pytest.mark.parametrize(("fails", "expected"), [(False, [7]), (True, [8])])
def test_second_delivery_waits_for_the_first_ones_transaction(
    broker: Any,
    application_url: str,
    admin: Connection,
    charges: Callable[[], list[int]],
    empty_redis: Callable[[], None],
    fails: bool,
    expected: list[int],
) -> None:
    suspended, wake = threading.Event(), threading.Event()

    def reach(point: str) -> None:
        if point == "charged" and not suspended.is_set():
            suspended.set()
            assert wake.wait(PATIENCE_S)
            if fails:
                raise RuntimeError("disk full")

    charge = charging.declared(broker, application_url, reach, max_retries=0)
    charge.send_with_options(args=(7,), idempotency_key="order")
    charge.send_with_options(args=(8,), idempotency_key="order")
    step_workers = StepWorker(broker), StepWorker(broker)
    messages = [step_workers[0].take() for _ in step_workers]
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(step_workers[0].run, messages[0])
        assert suspended.wait(PATIENCE_S)
        empty_redis()  # the first one was suspended for longer than its mark lives
        second = threads.submit(step_workers[1].run, messages[1])
        _wait_until_blocked(admin)
        wake.set()
        first.result(PATIENCE_S)
        second.result(PATIENCE_S)

    assert charges() == expected


def _wait_until_blocked(admin: Connection) -> None:
    deadline = datetime.now(UTC) + timedelta(seconds=PATIENCE_S)
    with admin.cursor() as cursor:
        while datetime.now(UTC) < deadline:
            cursor.execute(
                "SELECT 1 FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND query LIKE '%completions%'"
            )
            if cursor.fetchone():
                return
    pytest.fail("the second transaction does not wait")


def test_answer_to_the_commit_that_is_lost_charges_once(
    broker: Any, application_url: str, charges: Callable[[], list[int]]
) -> None:
    attempts: list[str] = []

    def reach(point: str) -> None:
        if point == "committed" and not attempts:
            attempts.append(point)
            raise psycopg2.OperationalError("server closed the connection unexpectedly")

    charge = charging.declared(broker, application_url, reach)
    charge.send(7)
    step_worker = StepWorker(broker)
    step_worker.run()
    step_worker.come_due()
    step_worker.run()

    assert attempts == ["committed"]
    assert charges() == [7]
    assert queued(broker) == queued(broker, "default.DQ") == []


def _psycopg2(application_url: str) -> AbstractContextManager[Any]:
    return closing(psycopg2.connect(application_url))


@contextmanager
def _psycopg(application_url: str) -> Iterator[Any]:
    with psycopg.connect(application_url) as own:
        yield own


@contextmanager
def _of_the_library(application_url: str) -> Iterator[Any]:
    with database.atomic():
        yield None


@pytest.mark.parametrize("connect", [_psycopg2, _psycopg, _of_the_library])
def test_completion_commits_and_rolls_back_with_each_kind_of_connection(
    broker: Any, application_url: str, empty_redis: Callable[[], None], connect: Callable[[str], Any]
) -> None:
    found: list[int] = []
    errors = iter([RuntimeError("no funds")])

    @dramatiq.actor(broker=broker, idempotent=True, deduplicate=None)
    def work() -> None:
        with connect(application_url) as own:
            housekeeping.complete_in(own)
            for error in errors:
                raise error
            found.append(1)
            if own is not None:
                own.commit()

    work.send()
    step_worker = StepWorker(broker)
    step_worker.run()
    assert Completion.select().count() == 0
    step_worker.come_due()
    message = step_worker.run()
    empty_redis()
    step_worker.run(delivered_again(message))

    assert Completion.select().count() == 1
    assert found == [1]


def test_actor_that_catches_every_exception_cannot_commit_twice(
    broker: Any, application_url: str, charges: Callable[[], list[int]], empty_redis: Callable[[], None]
) -> None:
    @dramatiq.actor(broker=broker, idempotent=True)
    def charge() -> None:
        with closing(psycopg2.connect(application_url)) as own, own, own.cursor() as cursor:
            cursor.execute("INSERT INTO charges (order_id) VALUES (7)")
            try:
                housekeeping.complete_in(own)
            except Exception:
                pass

    charge.send()
    step_worker = StepWorker(broker)
    message = step_worker.run()
    empty_redis()
    step_worker.run(delivered_again(message))

    assert charges() == [7]


def test_async_actor_completes_in_its_transaction(
    application_url: str, broker: Any, charges: Callable[[], list[int]], empty_redis: Callable[[], None]
) -> None:
    broker.add_middleware(AsyncIO())

    @dramatiq.actor(broker=broker, idempotent=True)
    async def charge() -> None:
        async with await psycopg.AsyncConnection.connect(application_url) as own:
            await own.execute("INSERT INTO charges (order_id) VALUES (7)")
            with closing(psycopg2.connect(application_url)) as sync, sync:
                housekeeping.complete_in(sync)

    charge.send()
    step_worker = StepWorker(broker)
    broker.emit_before("worker_boot", None)
    message = step_worker.run()
    empty_redis()
    step_worker.run(delivered_again(message))
    broker.emit_after("worker_shutdown", None)

    assert charges() == [7]


@pytest.mark.slow
def test_redelivery_sends_the_followers_that_a_killed_worker_has_not(
    broker: Any, application_url: str, environment: dict[str, str], empty_redis: Callable[[], None]
) -> None:
    receipts: list[int] = []
    charge = charging.declared(broker, application_url)
    receipt: Any = dramatiq.actor(broker=broker, actor_name="receipt")(lambda order: receipts.append(order))
    dramatiq.pipeline([charge.message(7), receipt.message()], broker=broker).run()
    step_worker = StepWorker(broker)
    message = step_worker.take()
    command = [sys.executable, "-m", charging.__name__, "returned"]
    subprocess.run(command, input=message.encode(), env=environment | {"CHARGES_URL": application_url}, timeout=60)
    empty_redis()

    step_worker.run(message)
    step_worker.run()

    assert receipts == [7]


@pytest.mark.parametrize(("expires_in", "expected"), [(timedelta(hours=1), [7]), (timedelta(seconds=-1), [7, 7])])
def test_completion_counts_until_its_ttl_is_over(
    broker: Any,
    application_url: str,
    charges: Callable[[], list[int]],
    empty_redis: Callable[[], None],
    expires_in: timedelta,
    expected: list[int],
) -> None:
    charging.declared(broker, application_url, idempotency={"ttl": timedelta(days=7)}).send(7)
    step_worker = StepWorker(broker)
    message = step_worker.run()
    (completion,) = Completion.select()
    assert timedelta(days=6) < completion.expires_at - datetime.now(UTC) <= timedelta(days=7)
    Completion.update(expires_at=datetime.now(UTC) + expires_in).execute()
    empty_redis()

    step_worker.run(delivered_again(message))

    assert charges() == expected


def test_completion_without_a_transaction_is_refused_and_not_recorded(
    broker: Any, application_url: str, charges: Callable[[], list[int]]
) -> None:
    refused: list[str] = []

    @dramatiq.actor(broker=broker, idempotent=True, max_retries=0)
    def work() -> None:
        with closing(psycopg2.connect(application_url)) as own:
            own.autocommit = True
            for connection in (own, None):
                with pytest.raises(HousekeepingError) as error:
                    housekeeping.complete_in(connection)
                refused.append(str(error.value))

    work.send()
    StepWorker(broker).run()

    assert refused == ["complete_in() was called outside of a transaction"] * 2
    assert Completion.select().count() == 0


def test_completion_outside_of_an_idempotent_message_is_refused(broker: Any) -> None:
    refused: list[str] = []

    @dramatiq.actor(broker=broker)
    def work() -> None:
        with pytest.raises(HousekeepingError) as error:
            housekeeping.complete_in()
        refused.append(str(error.value))

    work.send()
    StepWorker(broker).run()
    work.fn()

    assert refused == ["complete_in() was called outside of a message of an actor with idempotent=True"] * 2


def test_completion_costs_one_statement(broker: Any, application_url: str) -> None:
    executed: list[str] = []

    class Counting:
        def __init__(self, own: Any) -> None:
            self._own = own
            self.autocommit, self.info = own.autocommit, own.info

        def cursor(self) -> Any:
            cursor = self._own.cursor()
            executed.append("cursor")
            return cursor

    @dramatiq.actor(broker=broker, idempotent=True)
    def work() -> None:
        with closing(psycopg2.connect(application_url)) as own, own:
            housekeeping.complete_in(Counting(own))

    work.send()
    StepWorker(broker).run()

    assert executed == ["cursor"]
