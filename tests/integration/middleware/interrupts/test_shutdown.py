"""Interrupts of running actors when a worker shuts down."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from typing import Any

import dramatiq
import pytest
import redis
from dramatiq import Broker, MessageProxy, Middleware, Worker
from dramatiq.brokers.redis import RedisBroker
from dramatiq.middleware import AsyncIO, Shutdown

from housekeeping import Settings
from tests.integration.middleware.applications import close_all, installed, queued

PATIENCE_S = 60


@pytest.fixture
def broker(settings: Settings, redis_client: redis.Redis) -> Iterator[RedisBroker]:
    yield installed(settings.model_copy(update={"database_url": None, "grace_s": 1.0}))
    close_all()


class Endless:
    """Actor that runs until it is interrupted or released."""

    def __init__(self, broker: RedisBroker, first: Callable[[], object] = lambda: None, **options: Any) -> None:
        self.began, self.may_end, self.interrupted = threading.Event(), threading.Event(), threading.Event()

        @dramatiq.actor(broker=broker, max_retries=0, **{"actor_name": "endless", **options})
        def endless() -> None:
            first()
            self.began.set()
            try:
                while not self.may_end.wait(0.01):
                    pass
            except Shutdown:
                self.interrupted.set()
                raise

        self.actor = endless


def started(broker: RedisBroker, endless: Endless) -> Worker:
    endless.actor.send()
    worker = Worker(broker, worker_timeout=20, worker_threads=1)
    worker.start()
    assert endless.began.wait(PATIENCE_S)
    return worker


def test_actor_is_interrupted_after_the_grace_and_requeued(broker: RedisBroker) -> None:  # R5
    endless = Endless(broker)

    started(broker, endless).stop(timeout=PATIENCE_S * 1000)

    [message] = queued(broker)
    assert endless.interrupted.is_set()
    assert "retries" not in message.options
    assert broker.client.llen(f"{broker.namespace}:default") == 1


def test_actor_that_ends_within_the_grace_is_acknowledged(settings: Settings, redis_client: redis.Redis) -> None:  # R5
    broker = installed(settings.model_copy(update={"database_url": None, "grace_s": 600.0}))
    endless = Endless(broker)

    class EndDuringTheGrace(Middleware):
        def before_worker_shutdown(self, broker: Broker, worker: Worker) -> None:
            endless.may_end.set()

    broker.add_middleware(EndDuringTheGrace())
    started(broker, endless).stop(timeout=PATIENCE_S * 1000)

    assert not endless.interrupted.is_set()
    assert queued(broker) == []
    close_all()


def test_actor_with_shutdown_notification_is_interrupted_at_once(
    settings: Settings, redis_client: redis.Redis
) -> None:  # R5
    broker = installed(settings.model_copy(update={"database_url": None, "grace_s": 600.0}))
    endless = Endless(broker, notify_shutdown=True)

    started(broker, endless).stop(timeout=PATIENCE_S * 1000)
    close_all()

    assert endless.interrupted.is_set()


def test_thread_in_its_after_hooks_is_never_interrupted(broker: RedisBroker) -> None:  # R5
    class SlowHook(Middleware):
        def __init__(self) -> None:
            self.began, self.may_end, self.ended = threading.Event(), threading.Event(), threading.Event()

        def after_process_message(
            self, broker: Broker, message: MessageProxy, *, result: Any = None, exception: BaseException | None = None
        ) -> None:
            self.began.set()
            while not self.may_end.wait(0.01):
                pass
            self.ended.set()

    hook = SlowHook()
    broker.add_middleware(hook)

    @dramatiq.actor(broker=broker, notify_shutdown=True)
    def quick() -> None: ...

    quick.send()
    worker = Worker(broker, worker_timeout=20, worker_threads=1)
    worker.start()
    assert hook.began.wait(PATIENCE_S)
    threading.Timer(1.5, hook.may_end.set).start()
    worker.stop(timeout=PATIENCE_S * 1000)

    assert hook.ended.is_set()
    assert queued(broker) == []


@pytest.mark.parametrize(("grace_s", "at_once"), [(1.0, False), (600.0, True)], ids=["after_the_grace", "at_once"])
def test_actor_that_called_another_as_a_function_is_interrupted(  # R5
    settings: Settings, redis_client: redis.Redis, grace_s: float, at_once: bool
) -> None:
    broker = installed(settings.model_copy(update={"database_url": None, "grace_s": grace_s}))
    other = dramatiq.actor(broker=broker, actor_name="other")(lambda: None)
    endless = Endless(broker, first=other, notify_shutdown=at_once)
    worker = started(broker, endless)

    release = threading.Timer(PATIENCE_S, endless.may_end.set)
    release.start()
    worker.stop(timeout=2 * PATIENCE_S * 1000)
    release.cancel()
    close_all()

    assert endless.interrupted.is_set()


def test_actor_called_as_a_function_is_not_interrupted(broker: RedisBroker) -> None:
    in_worker, called = Endless(broker), Endless(broker, actor_name="called")
    worker = started(broker, in_worker)
    caller = threading.Thread(target=called.actor)
    caller.start()
    assert called.began.wait(PATIENCE_S)

    worker.stop(timeout=PATIENCE_S * 1000)
    called.may_end.set()
    caller.join(PATIENCE_S)

    assert (in_worker.interrupted.is_set(), called.interrupted.is_set()) == (True, False)


@pytest.mark.slow
def test_interrupted_coroutine_that_ends_slowly_is_requeued(broker: RedisBroker) -> None:  # R5
    began, may_end, ended = threading.Event(), threading.Event(), threading.Event()

    class EndBeforeTheLoop(Middleware):
        def after_worker_shutdown(self, broker: Broker, worker: Worker) -> None:
            may_end.set()
            assert ended.wait(PATIENCE_S)

    broker.add_middleware(AsyncIO())
    broker.add_middleware(EndBeforeTheLoop())  # its hook is called first

    @dramatiq.actor(broker=broker)
    async def slow() -> None:
        began.set()
        try:
            await asyncio.sleep(PATIENCE_S)
        finally:
            await asyncio.to_thread(may_end.wait, PATIENCE_S)  # Dramatiq waits for it for a second
            ended.set()

    slow.send()
    worker = Worker(broker, worker_timeout=20, worker_threads=1)
    worker.start()
    assert began.wait(PATIENCE_S)
    worker.stop(timeout=PATIENCE_S * 1000)

    [message] = queued(broker)
    assert "retries" not in message.options
