"""Actors that lose their lease while they run (L2 to L4), on real servers."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import dramatiq
import pytest
import redis
from dramatiq import Actor, Broker, Message, MessageProxy, Middleware

import housekeeping
from housekeeping import ExclusiveLease, Settings
from tests.faults import at_step
from tests.integration.middleware.applications import eventually, queued
from tests.integration.middleware.endless import Endless
from tests.integration.middleware.step_worker import StepWorker
from tests.internals.core import LostLease, MessageContext, RedisUnavailable, current_message
from tests.internals.database import Database, connect_to, database
from tests.internals.leases import LeaseRow, RedisLeaseStore, current_lease
from tests.internals.ledger import Run

KEY = "報告/夜"
TTL = timedelta(minutes=10)
SHORT = timedelta(seconds=3)
PATIENCE_S = 60


def declared(
    broker: Broker,
    function: Callable[[], object],
    *,
    ttl: timedelta = TTL,
    if_held: str = "skip",
    fenced: bool = False,
    **options: Any,
) -> Actor[..., Any]:
    def work() -> None:
        function()

    terms = {"key": KEY, "ttl": ttl, "if_held": if_held, "fenced": fenced}
    return dramatiq.actor(broker=broker, actor_name="work", exclusive_lease=terms, **options)(work)


def lose(client: redis.Redis, settings: Settings) -> None:
    assert client.delete(f"{settings.namespace}:lease:{KEY}")


def ends(caplog: pytest.LogCaptureFixture) -> list[Any]:
    return [vars(record).get("outcome") for record in caplog.records if record.message == "Run ended"]


def test_actor_that_lost_its_lease_is_interrupted_and_retried(
    broker: Any,
    step_worker: StepWorker,
    redis_client: redis.Redis,
    settings: Settings,
    caplog: pytest.LogCaptureFixture,
) -> None:
    # L2
    caplog.set_level("INFO")
    endless, successor = Endless(), ExclusiveLease(KEY, TTL)

    def work() -> None:
        lose(redis_client, settings)
        assert successor.try_obtain() is not None
        endless()

    declared(broker, work, ttl=SHORT).send()
    step_worker.run()

    assert endless.interrupted
    assert ends(caplog) == ["lost_lease"]
    assert [message.options.get("retries") for message in queued(broker, "default.DQ")] == [1]
    assert successor.renew(), "its successor's is left alone"


def test_actor_that_lost_its_lease_in_a_destructor_is_interrupted(
    broker: Any, step_worker: StepWorker, redis_client: redis.Redis, settings: Settings
) -> None:
    # L2: Python ignores what is raised there
    endless = Endless()

    class Freed:
        def __del__(self) -> None:
            lose_and_notice(redis_client, settings)
            time.sleep(0.2)  # an interrupt would arrive

    def work() -> None:
        Freed()
        endless()

    declared(broker, work, ttl=SHORT).send()
    step_worker.run()

    assert endless.interrupted


def test_actor_is_interrupted_before_expiry_though_redis_does_not_answer(broker: Any, step_worker: StepWorker) -> None:
    # L2: the renewal thread hangs, too
    endless, answered, asked_after = Endless(), threading.Event(), []

    def silent() -> None:
        answered.wait(PATIENCE_S)
        raise RedisUnavailable("no answer")

    def work() -> None:
        try:
            endless()
        finally:
            asked_after.append(answered.is_set())
            answered.set()

    declared(broker, work, ttl=SHORT).send()
    with at_step(RedisLeaseStore, "renew", "before", silent):
        step_worker.run()

    assert endless.interrupted
    assert asked_after == [False]


def lose_and_notice(client: redis.Redis, settings: Settings) -> None:
    """Lose the lease of the current message, and wait until its renewal has noticed."""
    lease = current_lease.get()
    assert lease is not None
    lose(client, settings)
    eventually(lambda: lease.lost)


def test_actor_that_lost_its_lease_before_it_began_does_not_begin(
    broker: Any, step_worker: StepWorker, redis_client: redis.Redis, settings: Settings
) -> None:
    # L2
    class LosesIt(Middleware):
        def before_process_message(self, broker: Broker, message: MessageProxy) -> None:
            lose_and_notice(redis_client, settings)

    runs: list[int] = []
    broker.middleware.append(LosesIt())
    declared(broker, lambda: runs.append(1), ttl=SHORT).send()
    step_worker.run()

    assert runs == []
    assert [message.options.get("retries") for message in queued(broker, "default.DQ")] == [1]


@pytest.mark.slow  # the lease lives for three seconds
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_lease_and_key_of_an_ended_thread_expire(
    broker: Any, step_worker: StepWorker, redis_client: redis.Redis, settings: Settings
) -> None:
    # D4, L2
    class Ending(Middleware):
        def before_process_message(self, broker: Broker, message: MessageProxy) -> None:
            raise SystemExit

        def after_process_message(self, broker: Broker, message: MessageProxy, **outcome: Any) -> None:
            raise SystemExit  # which Dramatiq does not catch

    key: Any = {"idempotent": True, "deduplicate": "until_executed", "deduplication": {"ttl": SHORT}}
    broker.add_middleware(Ending())
    declared(broker, lambda: None, ttl=SHORT, **key).send()
    thread = threading.Thread(target=step_worker.run)
    thread.start()
    thread.join()

    kinds = ("lease", "dedup")
    assert all(redis_client.keys(f"{settings.namespace}:{kind}:*") for kind in kinds)
    eventually(lambda: not any(redis_client.keys(f"{settings.namespace}:{kind}:*") for kind in kinds))


def test_lease_lost_in_the_hooks_after_the_actor_interrupts_nothing(
    broker: Any,
    step_worker: StepWorker,
    redis_client: redis.Redis,
    settings: Settings,
    caplog: pytest.LogCaptureFixture,
) -> None:
    # L2: only inside the actor's own function; an interrupted hook could lose the message
    told: list[bool] = []

    class SlowHook(Middleware):
        def after_process_message(self, broker: Broker, message: MessageProxy, **_: Any) -> None:
            lose_and_notice(redis_client, settings)
            time.sleep(0.2)  # an interrupt would arrive
            told.append(True)

    broker.add_middleware(SlowHook())
    declared(broker, lambda: None, ttl=SHORT).send()
    step_worker.run()

    assert told == [True]
    assert queued(broker) == queued(broker, "default.DQ") == []
    assert "Lease was lost before its run ended" in caplog.text


def test_message_blocked_by_its_dead_attempts_lease_is_retried(broker: Any, step_worker: StepWorker) -> None:
    # L4, B1: a skip would lose its work
    runs: list[int] = []
    message = declared(broker, lambda: runs.append(1)).send()
    dead = current_message.set(MessageContext(message.message_id, worker="work"))
    lease = ExclusiveLease(KEY, TTL)
    lease.try_obtain()
    current_message.reset(dead)

    step_worker.run()

    assert runs == []
    (waiting,) = queued(broker, "default.DQ")
    assert "retries" not in waiting.options
    lease.cancel()
    step_worker.come_due()
    step_worker.run()
    assert runs == [1]


def test_dead_holders_lease_is_taken_over_within_two_ttls(broker: Any, step_worker: StepWorker) -> None:
    # L4, F3: by a message that is retried until the lease is free
    runs: list[int] = []
    declared(broker, lambda: runs.append(1), ttl=SHORT, if_held="retry").send()
    dead = ExclusiveLease(KEY, SHORT)
    dead.try_obtain()
    waits_ms: list[int] = []

    while not runs:
        put_back = step_worker.run()
        for waiting in queued(broker, "default.DQ"):
            waits_ms.append(waiting.options["eta"] - put_back.message_timestamp)
            lease_ends = threading.Event()
            lease_ends.wait((dead.remaining() or timedelta()).total_seconds())
            step_worker.come_due()

    assert 0 < sum(waits_ms) <= 2 * SHORT.total_seconds() * 1000


@pytest.fixture
def written(broker: Any, postgres: Database) -> Iterator[Callable[[], list[Any]]]:
    """Return a table that actors write to, and its rows."""
    postgres.execute_sql("CREATE TABLE written (epoch bigint)")
    yield lambda: [epoch for (epoch,) in postgres.execute_sql("SELECT epoch FROM written ORDER BY epoch")]


def write() -> None:
    with database.atomic():
        housekeeping.fence()
        epoch = LeaseRow.get(LeaseRow.key == KEY).epoch
        database.execute_sql("INSERT INTO written VALUES (%s)", (epoch,))


def test_each_run_of_an_actor_has_a_higher_epoch_and_may_commit(
    broker: Any, step_worker: StepWorker, written: Callable[[], list[Any]]
) -> None:
    # L3
    work = declared(broker, write, fenced=True)
    for _ in range(3):
        work.send()
        step_worker.run()

    assert len(set(written())) == 3
    assert [(lease.key, lease.epoch) for lease in LeaseRow.select()] == [(KEY, written()[-1])]


def test_actor_that_slept_cannot_commit_once_another_began(
    broker: Any,
    step_worker: StepWorker,
    redis_client: redis.Redis,
    settings: Settings,
    written: Callable[[], list[Any]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    # L3, F1
    caplog.set_level("INFO")
    inside: list[Message[Any]] = []

    def work() -> None:
        if not inside:
            inside.append(second)
            lose(redis_client, settings)
            thread = threading.Thread(target=step_worker.run)
            thread.start()
            thread.join(PATIENCE_S)
        write()

    actor = declared(broker, work, fenced=True)
    actor.send()
    fetched = step_worker.fetch()
    second = actor.send()
    step_worker.run(fetched)

    assert written() == [LeaseRow.get(LeaseRow.key == KEY).epoch]
    assert sorted(ends(caplog)) == ["done", "lost_lease"]
    assert [message.options.get("retries") for message in queued(broker, "default.DQ")] == [1]


@pytest.mark.parametrize("fenced", [False, True])
def test_database_outage_keeps_only_fenced_actors_from_running(
    broker: Any, step_worker: StepWorker, postgres: Database, fenced: bool
) -> None:
    # L3, L5: an actor that does not fence may need no database
    runs: list[str] = []
    declared(broker, lambda: runs.append("ran"), fenced=fenced).send()
    there = database.obj
    database.initialize(connect_to("postgresql://postgres@/postgres?host=/nowhere"))
    try:
        step_worker.run()
    finally:
        database.initialize(there)

    assert runs == ([] if fenced else ["ran"])
    assert [message.options.get("retries") for message in queued(broker, "default.DQ")] == ([1] if fenced else [])
    assert not ExclusiveLease(KEY, TTL).exists()


def test_tick_of_a_run_that_lost_its_lease_records_it(
    broker: Any, step_worker: StepWorker, postgres: Database, redis_client: redis.Redis, settings: Settings
) -> None:
    # L2, S5
    def work() -> None:
        lose(redis_client, settings)
        raise LostLease

    declared(broker, work, schedule="* * * * *").send_with_options(tick="2026-01-01T10:00:00+00:00", max_retries=0)
    step_worker.run()

    assert [(run.outcome, run.reason) for run in Run.select()] == [("lost_lease", "lease_lost")]
