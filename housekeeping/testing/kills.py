"""Whether a run that is killed anywhere leaves nothing undone and nothing done twice."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final
from uuid import uuid4

from housekeeping.core.redis_client import shared_redis
from housekeeping.leases.lease import RedisLeaseStore
from housekeeping.sweeps.declaration import Sweep
from housekeeping.sweeps.ledger import runs
from housekeeping.sweeps.ledger.models import NOW, Run
from housekeeping.testing.outcomes import last_run, nothing_to_do, run_as, run_to_the_end, totals
from housekeeping.testing.points import Ended, in_a_process
from housekeeping.testing.tables import Outside, Tables

#: pytest shows the line of the test, not those of this module.
__tracebackhide__: Final = True


def assert_survives_kill(
    sweep: Sweep,
    argument: Any = None,
    *,
    now: datetime | None = None,
    ignoring: Sequence[str] = (),
    outside: Outside | None = None,
    restore: Callable[[], Any] | None = None,
) -> list[str]:
    """Kill a run by SIGKILL at each point, let its message be delivered again, and compare with an undisturbed run.

    A point is each statement, Redis command, file written by Python, started program and request by `http.client`:
    between any two of them the run is killed, each time in a process of its own, over the rows that are in the tables
    now. About 0.1 s a point; a few batches of a few rows are enough. The dead run's silence and the ttl of its lease
    are over at once.

    ::

        def test_it_survives_kill(expired_sessions):
            assert_survives_kill(sweep)

    Parameters:
      argument, now, ignoring: As of `assert_idempotent`.
      outside: Reads what the sweep does outside of PostgreSQL; it must end like that of an undisturbed run, too.
      restore: Makes the outside as it was, called before each run.

    Returns:
      The points.

    Raises:
      AssertionError: With the point and the first rows that differ. Also when there was nothing to do.
      Refused: When a table has more than 10,000 rows, or a transaction of the test is open.

    Note: What the killed process keeps in memory, a list in the test too, is gone with it. What a compiled library
      sends or writes, obstore for one, is no point: the returned ones show what was.
    """
    with Tables(sweep) as tables:
        tables.keep("at_first")
        try:
            return _Trials(sweep, argument, now or datetime.now(UTC), ignoring, outside, restore, tables).go()
        finally:
            tables.put_back("at_first")


@dataclass
class _Trials:
    sweep: Sweep
    argument: Any
    now: datetime
    ignoring: Sequence[str]
    outside: Outside | None
    restore: Callable[[], Any] | None
    tables: Tables

    def go(self) -> list[str]:
        self.since = last_run()
        self.alive = random.getrandbits(62)
        points = self._learn()
        if wrong := self._wrong_after(None)[1]:
            self._fail("ends differently when it is run undisturbed twice; name what may differ by `ignoring`", wrong)
        self._check_the_count()
        for number in range(len(points) + 1):
            ended, wrong = self._wrong_after(number)
            if wrong:
                self._fail_at(ended, number, len(points), wrong)
            if not ended.killed:
                break
        return points

    def _learn(self) -> list[str]:
        """How it should end: by an undisturbed run."""
        self._start_over()
        before = self._look_outside()
        ended = self._run(None)
        self.settled, self.seen = totals(self.sweep, self.since), self._look_outside()
        if not self.tables.differences("at_first") and self.seen == before:
            raise AssertionError(nothing_to_do(self.sweep, self.since))
        self.tables.keep("at_last")
        return ended.points

    def _check_the_count(self) -> None:
        if self.sweep.action is None or not self.settled:
            return  # only the author of its passes knows which rows they count
        (name, counted), *_ = self.settled.items()
        changed = self.tables.changed_rows("at_first", self.sweep.model, self.ignoring)
        if counted != changed:
            raise AssertionError(f"{self.sweep.name}: the ledger counts {counted} {name}, but {changed} rows changed")

    def _run(self, kill_at: int | None) -> Ended:
        self._start_over()
        message_id = str(uuid4())
        ended = in_a_process(lambda: self._one_run(message_id), kill_at, self.alive)
        # A backend goes on with what it has in hand for a moment after its client is gone, and holds its locks.
        self.tables.run("SELECT pg_advisory_lock(%s)", (self.alive,))
        self.tables.run("SELECT pg_advisory_unlock(%s)", (self.alive,))
        if ended.said not in (None, "done", "partial"):
            raise AssertionError(f"{self.sweep.name}: the run ended as {ended.said}")
        self._let_time_pass()
        try:
            run_to_the_end(self.sweep, self.argument, self.now, message_id)
        except AssertionError as error:
            error.add_note(_where(ended))
            raise
        return ended

    def _one_run(self, message_id: str) -> str:
        result = run_as(message_id, self.sweep, self.argument, self.now)
        return result.outcome if result.error is None else f"{result.outcome}: {result.reason}"

    def _wrong_after(self, kill_at: int | None) -> tuple[Ended, list[str]]:
        ended = self._run(kill_at)
        wrong = [str(difference) for difference in self.tables.differences("at_last", self.ignoring)]
        settled = totals(self.sweep, self.since)
        if settled != self.settled:
            wrong.append(f"  the ledger counts {settled} in all, and {self.settled} for an undisturbed run")
        if (seen := self._look_outside()) != self.seen:
            wrong += [f"  outside: {seen!r}", f"  undisturbed: {self.seen!r}"]
        return ended, wrong

    def _look_outside(self) -> object:
        return self.outside() if self.outside else None

    def _start_over(self) -> None:
        self.tables.put_back("at_first")
        Run.delete().where(Run.id > self.since).execute()
        if self.restore:
            self.restore()

    def _let_time_pass(self) -> None:
        """As long as it takes until nobody counts on the dead run any more."""
        Run.update(heartbeat_at=NOW - 2 * runs.SILENCE).where((Run.id > self.since) & Run.outcome.is_null()).execute()
        if self.sweep.lease is not None:
            store = RedisLeaseStore(shared_redis.get(), shared_redis.namespace)
            key = self.sweep.lease.key_for(self.argument)
            if (owner := store.owner(key)) is not None:
                store.release(key, owner)

    def _fail_at(self, ended: Ended, number: int, points: int, wrong: list[str]) -> None:
        self._fail(f"does not survive a kill at point {number + 1} of {points}", [_where(ended), *wrong])

    def _fail(self, what: str, lines: Sequence[str]) -> None:
        legend = "  (- in an undisturbed run only, + in this one only)"
        raise AssertionError("\n".join([f"{self.sweep.name} {what}", *lines, legend]))


def _where(ended: Ended) -> str:
    if not ended.killed:
        return "  not killed"
    done = ended.points[-2] if len(ended.points) > 1 else "(nothing)"
    return f"  killed after:  {done}\n  killed before: {ended.points[-1]}\n  and then run to the end"
