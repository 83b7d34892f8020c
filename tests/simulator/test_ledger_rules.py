"""Tests of PostgreSQL's rules that the ledger needs, on the real and the simulated server."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import Any, Protocol

import pytest
from peewee import OperationalError

from tests.internals.core import LeaseLost, RunTakenOver
from tests.internals.database import CompiledQuery, Database, PreparedQuery, database
from tests.internals.ledger import Run, runs
from tests.simulator import virtual_time
from tests.simulator.database import SimulatedDatabase
from tests.simulator.postgres import Postgres
from tests.simulator.virtual_threads import thread_locals_by_task
from tests.simulator.world import Process, Task, World

_TICK = datetime(2026, 1, 1, tzinfo=UTC)


class Two(Protocol):
    """Two connections, one of which acts while the other one is busy."""

    def meanwhile(self, first: Callable[[Callable[[], None]], object], second: Callable[[], object]) -> list[str]:
        """Run the first function and start the second where it calls its argument. Return the order of the ends."""


class _RealTwo:
    def __init__(self, postgres: Database) -> None:
        self._postgres = postgres

    def meanwhile(self, first: Callable[[Callable[[], None]], object], second: Callable[[], object]) -> list[str]:
        ended: list[str] = []

        def do() -> None:
            try:
                second()
                ended.append("second")
            except Exception as error:
                ended.append(f"second: {type(error).__name__}")
            finally:
                self._postgres.close()

        thread = threading.Thread(target=do)

        waits: list[bool] = []

        def begin() -> None:
            thread.start()
            thread.join(0.5)  # it waits for a lock or has ended
            waits.append(thread.is_alive())

        first(begin)
        thread.join(20)
        # The one that waited ends as soon as the other one has committed, maybe before that gets its answer.
        return ["first", *ended] if waits == [True] else [*ended, "first"]


class _Straight:
    """Faults that never happen."""

    def around(self, world: World, task: Task, store: str, name: str, effect: Callable[[], Any]) -> Any:
        world.sleep(0.001)
        return effect()


class _SimulatedTwo:
    def __init__(self, world: World, process: Process) -> None:
        self._world, self._process = world, process

    def meanwhile(self, first: Callable[[Callable[[], None]], object], second: Callable[[], object]) -> list[str]:
        ended: list[str] = []

        def doing(name: str, work: Callable[[], object]) -> Callable[[], None]:
            def do() -> None:
                try:
                    work()
                    ended.append(name)
                except Exception as error:
                    ended.append(f"{name}: {type(error).__name__}")

            return do

        def begin() -> None:
            self._world.spawn(self._process, "second", doing("second", second))
            self._world.sleep(1.0)

        self._world.spawn(self._process, "first", doing("first", lambda: first(begin)))
        self._world.run(self._world.now + 30)
        return ended


@pytest.fixture(params=["real", "stand-in"])
def two(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Two]:
    if request.param == "real":
        yield _RealTwo(request.getfixturevalue("postgres"))
        return
    world = World(0, _Straight())
    postgres = Postgres(world)
    simulated = SimulatedDatabase(lambda: postgres)
    virtual_time.enter(world)
    thread_locals_by_task(simulated)
    database.initialize(simulated)
    monkeypatch.setattr(CompiledQuery, "rows", lambda statement, *values: simulated.rows(statement, *values))
    monkeypatch.setattr(PreparedQuery, "rows_at_once", lambda query, *values: simulated.rows_at_once(query, *values))
    yield _SimulatedTwo(world, world.process("test"))
    world.end()
    database.initialize(None)


def begun(message_id: str = "m1", token: str = "t1", lease: str | None = "k") -> runs.RunStart | None:
    return runs.begin(
        "w", message_id=message_id, tick=_TICK, trigger="enqueue", lease=None if lease is None else (lease, token)
    )


def in_batch(attempt: runs.RunStart, then: Callable[[], None] = lambda: None) -> None:
    with database.atomic():
        runs.advance(attempt.run_id, {"settled": 1}, {"pass": "rows", "after": [1]}, attempt.fence)
        then()


def alone(two: Two, work: Callable[[], object]) -> list[str]:
    """Return how undisturbed work ends."""

    def both(begin: Callable[[], None]) -> None:
        begin()
        work()

    return [each for each in two.meanwhile(both, lambda: None) if each != "second"]


def test_new_holder_waits_for_the_batch_of_the_last_one(two: Two) -> None:
    ended = two.meanwhile(lambda begin: in_batch(_sure(begun()), begin), lambda: begun("m2", "t2"))

    assert ended == ["first", "second"]


def test_batch_with_an_old_epoch_does_not_commit(two: Two) -> None:
    counts: list[Any] = []

    def work() -> None:
        old = _sure(begun())
        begun("m2", "t2")
        with pytest.raises(LeaseLost):
            in_batch(old)
        row: Any = Run.select(Run.counts).where(Run.id == old.run_id).tuples().get()
        counts.append(row[0])

    assert alone(two, work) == ["first"]
    assert counts == [{}]


def test_each_epoch_is_higher_than_all_before(two: Two) -> None:
    epochs: list[int] = []

    def work() -> None:
        fences = [_sure(begun(f"m{number}", f"t{number}")).fence for number in range(3)]
        epochs.extend(fence.epoch for fence in fences if fence is not None)

    assert alone(two, work) == ["first"]
    assert len(epochs) == 3 and epochs == sorted(set(epochs))


def test_run_after_its_takeover_commits_nothing(two: Two) -> None:
    def work() -> None:
        old = _sure(begun())
        again = _sure(begun(token="t2"))
        with pytest.raises(RunTakenOver), database.atomic():
            runs.advance(old.run_id, {"settled": 1}, None, None)
        assert Run.select(Run.outcome).where(Run.id == old.run_id).tuples().get() == ("lost",)
        assert Run.select(Run.outcome).where(Run.id == again.run_id).tuples().get() == (None,)

    assert alone(two, work) == ["first"]


def test_interrupted_run_is_resumed_and_a_finished_one_is_not(two: Two) -> None:
    def work() -> None:
        in_batch(_sure(begun()))
        second = _sure(begun(token="t2"))
        assert second.cursor == {"pass": "rows", "after": [1]}
        with database.atomic():
            runs.finish(second.run_id, "done", None, counts={}, cursor=None, fence=second.fence)
        assert begun(token="t3") is None
        assert _sure(begun("m2", "t3")).cursor is None

    assert alone(two, work) == ["first"]


def test_rolled_back_changes_are_invisible(two: Two) -> None:
    def work() -> None:
        run = _sure(begun(lease=None))
        with pytest.raises(OperationalError), database.atomic():
            runs.advance(run.run_id, {"settled": 1}, None, None)
            raise OperationalError("the batch failed")
        closed = runs.fail(run.run_id, "failed", "why", None, {"failed": 2})
        assert (closed.outcome, closed.counts) == ("failed", {"failed": 2})

    assert alone(two, work) == ["first"]


def test_holder_is_gone_after_its_run_ended(two: Two) -> None:
    def work() -> None:
        run = _sure(begun())
        assert not runs.holder_is_gone("w", "k", "t1")
        assert not runs.holder_is_gone("w", "k", "another")
        runs.fail(run.run_id, "failed", "why", None, {})
        assert runs.holder_is_gone("w", "k", "t1")

    assert alone(two, work) == ["first"]


def _sure(attempt: runs.RunStart | None) -> runs.RunStart:
    assert attempt is not None
    return attempt
