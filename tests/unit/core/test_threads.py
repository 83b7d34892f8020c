from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextvars import ContextVar

import dramatiq
import pytest
from dramatiq.brokers.stub import StubBroker

from housekeeping import in_thread

PATIENCE_S = 10
tenant: ContextVar[str] = ContextVar("tenant")


def test_call_has_the_context_of_its_task_and_returns() -> None:
    async def main() -> tuple[str, bool]:
        tenant.set("shop")
        return await in_thread(lambda suffix: (tenant.get() + suffix, is_main_thread()), "!")

    assert asyncio.run(main()) == ("shop!", False)


def is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def test_message_is_sent_without_blocking() -> None:
    broker = StubBroker()
    broker.declare_queue("default")

    @dramatiq.actor(broker=broker)
    def notify(order: int) -> None: ...

    sent = asyncio.run(in_thread(notify.send, 7))

    assert (sent.args, broker.queues["default"].qsize()) == ((7,), 1)


@pytest.mark.parametrize(
    ("call", "kind"), [(lambda: divmod(1, 0), ZeroDivisionError), (lambda: next(iter(())), RuntimeError)]
)
def test_error_of_the_call_is_raised(call: Callable[[], object], kind: type[Exception]) -> None:
    with pytest.raises(kind):
        asyncio.run(in_thread(call))


@pytest.mark.parametrize("fails", [False, True])
def test_canceled_task_waits_until_its_call_has_ended(fails: bool) -> None:
    began, may_end, ended = threading.Event(), threading.Event(), threading.Event()

    def call() -> None:
        began.set()
        assert may_end.wait(PATIENCE_S)
        ended.set()
        if fails:
            raise RuntimeError

    async def main() -> None:
        calling = asyncio.create_task(in_thread(call))
        await asyncio.to_thread(began.wait, PATIENCE_S)
        for _ in range(2):
            calling.cancel()
            await asyncio.sleep(0)
        assert not calling.done()
        may_end.set()
        with pytest.raises(asyncio.CancelledError):
            await calling
        assert ended.is_set()

    asyncio.run(main())


def test_time_limit_around_a_call_ends_after_it() -> None:
    async def main() -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0):
                await in_thread(lambda: None)
        await asyncio.sleep(0)

    asyncio.run(main())
