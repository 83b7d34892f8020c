"""Leases of coroutines: ``async with`` never blocks the event loop, and leaves no lease behind."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from contextlib import suppress
from datetime import timedelta
from typing import Any

import pytest

from housekeeping import ExclusiveLease, HousekeepingError, LeaseHeld, LeaseLost, fence
from tests.integration.leases.test_leases import KEY, TTL, Expire
from tests.integration.leases.test_leases import expire as expire
from tests.integration.leases.test_leases import store as store
from tests.integration.leases.test_leases import store_and_expire as store_and_expire
from tests.internals.database import Database
from tests.internals.leases import LeaseStore

PATIENCE_S = 60


class Slow:
    """Store whose server answers `obtain` once the test lets it.

    Attributes:
      obtained: Set once the server has decided.
      answer: Set by the test.
    """

    def __init__(self, store: LeaseStore) -> None:
        self._store = store
        self.obtained, self.answer = threading.Event(), threading.Event()
        self.before_answer: Callable[[], object] = lambda: None

    def obtain(self, key: str, token: str, ttl: timedelta) -> str:
        holder = self._store.obtain(key, token, ttl)
        self.obtained.set()
        assert self.answer.wait(PATIENCE_S), "the event loop was blocked"
        self.before_answer()
        return holder

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


@pytest.fixture
def slow(store: LeaseStore) -> Any:
    return Slow(store)


def run(main: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine; fail if it hangs."""

    async def bounded() -> Any:
        async with asyncio.timeout(3 * PATIENCE_S):
            return await main

    return asyncio.run(bounded(), debug=False)


def test_block_holds_its_lease_until_its_end(store: LeaseStore) -> None:
    # L1
    async def main() -> None:
        async with ExclusiveLease(KEY, TTL, store) as lease:
            lease.check()
            with pytest.raises(LeaseHeld, match=KEY):
                async with ExclusiveLease(KEY, TTL, store):
                    pass
            lease.check()

    run(main())

    assert store.owner(KEY) is None


def test_event_loop_continues_while_a_lease_is_acquired(slow: Any) -> None:
    async def main() -> None:
        entering = asyncio.create_task(enter(slow))
        await asyncio.to_thread(slow.obtained.wait, PATIENCE_S)
        slow.answer.set()
        await entering

    run(main())


async def enter(store: LeaseStore) -> None:
    async with ExclusiveLease(KEY, TTL, store):
        await asyncio.sleep(0)


def test_second_task_waits_for_the_first_in_one_event_loop(store: LeaseStore) -> None:
    at_work = list[str]()

    async def work(name: str) -> None:
        async with ExclusiveLease(KEY, TTL, store, retries=1000, sleep=0.01):
            at_work.append(f"{name} begins")
            await asyncio.sleep(0.01)
            at_work.append(f"{name} ends")

    async def main() -> None:
        await asyncio.gather(work("a"), work("b"))

    run(main())

    first, second = at_work[0][0], at_work[2][0]
    assert at_work == [f"{first} begins", f"{first} ends", f"{second} begins", f"{second} ends"]
    assert first != second


def test_task_canceled_while_it_acquires_leaves_no_lease(slow: Any) -> None:
    # L1: canceled twice, as by a timeout and then by the end of the event loop
    async def main() -> None:
        entering = asyncio.create_task(enter(slow))
        await asyncio.to_thread(slow.obtained.wait, PATIENCE_S)
        for _ in range(2):
            entering.cancel()
            await asyncio.sleep(0)
        slow.answer.set()
        with pytest.raises(asyncio.CancelledError):
            await entering
        assert slow.owner(KEY) is None

    run(main())


@pytest.mark.parametrize("steps", range(8))
def test_task_canceled_at_any_step_after_the_answer_leaves_no_lease(slow: Any, steps: int) -> None:
    # L1: the answer has arrived, and the task has not continued yet
    async def main() -> None:
        loop = asyncio.get_running_loop()
        entering = asyncio.create_task(enter(slow))

        def cancel(left: int) -> None:
            if left:
                loop.call_soon(cancel, left - 1)
            else:
                entering.cancel()

        slow.before_answer = lambda: loop.call_soon_threadsafe(cancel, steps)
        slow.answer.set()
        with suppress(asyncio.CancelledError):
            await entering
        assert slow.owner(KEY) is None

    run(main())


def test_lost_lease_cancels_its_block_which_raises(store: LeaseStore) -> None:
    # L2
    async def main() -> None:
        async with ExclusiveLease(KEY, timedelta(seconds=3), store) as lease:
            store.release(KEY, str(lease.owner()))
            await asyncio.Event().wait()  # until the renewal notices it

    with pytest.raises(LeaseLost, match=KEY) as raised:
        run(main())

    assert isinstance(raised.value.__cause__, asyncio.CancelledError)


@pytest.mark.slow
def test_task_can_wait_again_after_its_lease_was_lost(store: LeaseStore) -> None:
    async def main() -> int:
        with suppress(LeaseLost):
            async with ExclusiveLease(KEY, timedelta(seconds=3), store) as lease:
                store.release(KEY, str(lease.owner()))
                await asyncio.Event().wait()
        await asyncio.sleep(0)
        task = asyncio.current_task()
        assert task is not None
        return task.cancelling()

    assert run(main()) == 0


def test_lease_lost_unnoticed_raises_at_the_end_of_the_block(store: LeaseStore, expire: Expire) -> None:
    # L2
    async def main() -> None:
        async with ExclusiveLease(KEY, TTL, store):
            expire(KEY)

    with pytest.raises(LeaseLost, match=KEY):
        run(main())


def test_cancellation_of_a_block_releases_its_lease_and_stays_one(store: LeaseStore) -> None:
    async def main() -> None:
        entered = asyncio.Event()

        async def hold() -> None:
            async with ExclusiveLease(KEY, TTL, store):
                entered.set()
                await asyncio.Event().wait()

        holding = asyncio.create_task(hold())
        await entered.wait()
        holding.cancel()
        with pytest.raises(asyncio.CancelledError):
            await holding
        assert store.owner(KEY) is None

    run(main())


def test_block_of_a_stopped_event_loop_releases_its_lease(store: LeaseStore) -> None:
    async def hold() -> None:
        async with ExclusiveLease(KEY, TTL, store):
            loop.stop()
            await asyncio.Event().wait()

    loop = asyncio.new_event_loop()
    body = hold()
    task = loop.create_task(body)
    loop.run_forever()
    assert store.owner(KEY) is not None

    body.close()  # as the garbage collector does
    task.cancel()
    loop.run_until_complete(asyncio.wait([task]))
    loop.close()

    assert store.owner(KEY) is None


def test_block_within_an_open_transaction_is_refused(postgres: Database, store: LeaseStore) -> None:
    async def main() -> None:
        with postgres.atomic():
            postgres.execute_sql("SELECT 1")
            await enter(store)

    with pytest.raises(HousekeepingError, match="inside an open database transaction"):
        run(main())


def test_fence_of_a_block_is_checked_in_its_threads(postgres: Database, store: LeaseStore, expire: Expire) -> None:
    # L3
    def commit() -> None:
        try:
            with postgres.atomic():
                postgres.execute_sql("SELECT 1")
                fence()
        finally:
            postgres.close()

    async def main() -> None:
        async with ExclusiveLease(KEY, TTL, store, fenced=True):
            async with ExclusiveLease("another", TTL, store, fenced=True):
                await asyncio.to_thread(commit)
            await asyncio.to_thread(commit)
            expire(KEY)
            async with ExclusiveLease(KEY, TTL, store, fenced=True):
                pass
            async with ExclusiveLease("another", TTL, store):
                await asyncio.to_thread(commit)

    with pytest.raises(LeaseLost, match="newer holder"):
        run(main())
    with pytest.raises(HousekeepingError, match="outside of a block"):
        fence()


def test_block_without_an_epoch_cannot_fence(store: LeaseStore) -> None:
    with (
        ExclusiveLease(KEY, TTL, store),
        ExclusiveLease("another", TTL, store),
        pytest.raises(HousekeepingError, match="'another' has no epoch"),
    ):
        fence()
