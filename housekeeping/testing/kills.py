"""Assertion that a run can be killed at any point without losing or repeating work."""

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
from housekeeping.testing.outcomes import last_run, nothing_changed, progress_since, run_as, run_to_the_end
from housekeeping.testing.points import Ended, run_in_process
from housekeeping.testing.tables import Outside, Tables

#: pytest shows the line of the test instead of this module's.
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
    """Kill a run by SIGKILL at each point, deliver its message again, and compare with an uninterrupted run.

    Points are every statement, Redis command, file written by Python, program started and request by `http.client`. The
    run is killed before each of them, each time in a new process with the same initial rows. This takes about 0.1 s per
    point; a few batches of a few rows are enough. The killed run's silence and the ttl of its lease are skipped.

    ::

        def test_it_survives_kill(expired_sessions):
            assert_survives_kill(sweep)

    Parameters:
      argument, now, ignoring: As for `assert_idempotent`.
      outside: Returns the sweep's effects outside of PostgreSQL, which must end like those of an uninterrupted run.
      restore: Restores the initial state outside of PostgreSQL; called before each run.

    Returns:
      The points.

    Raises:
      AssertionError: With the point and the first rows that differ. Also when there is nothing to do.
      Refused: When a table has more than 10,000 rows, or a transaction of the test is open.

    Note: The killed process loses its memory, including lists of the test. Calls in compiled libraries such as obstore
      are not points; check the returned points.
    """
    with Tables(sweep) as tables:
        tables.save("at_first")
        try:
            return _Trials(sweep, argument, now or datetime.now(UTC), ignoring, outside, restore, tables).run()
        finally:
            tables.restore("at_first")


@dataclass
class _Trials:
    sweep: Sweep
    argument: Any
    now: datetime
    ignoring: Sequence[str]
    outside: Outside | None
    restore: Callable[[], Any] | None
    tables: Tables

    def run(self) -> list[str]:
        self.since = last_run()
        self.alive = random.getrandbits(62)
        points = self._run_uninterrupted()
        if problems := self._problems_after(None)[1]:
            self._fail("differs between two uninterrupted runs; name the columns to ignore by `ignoring`", problems)
        self._check_counts()
        for number in range(len(points) + 1):
            ended, problems = self._problems_after(number)
            if problems:
                self._fail_at(ended, number, len(points), problems)
            if not ended.killed:
                break
        return points

    def _run_uninterrupted(self) -> list[str]:
        """Run uninterrupted and remember the result."""
        self._reset()
        before = self._read_outside()
        ended = self._run(None)
        self.counts, self.seen = progress_since(self.sweep, self.since), self._read_outside()
        if not self.tables.differences("at_first") and self.seen == before:
            raise AssertionError(nothing_changed(self.sweep, self.since))
        self.tables.save("at_last")
        return ended.points

    def _check_counts(self) -> None:
        if self.sweep.action is None or not self.counts:
            return  # only the author of the stages knows which rows they count
        (name, counted), *_ = self.counts.items()
        changed = self.tables.changed_rows("at_first", self.sweep.model, self.ignoring)
        if counted != changed:
            raise AssertionError(f"{self.sweep.name}: {name} is {counted} in the ledger, but {changed} rows changed")

    def _run(self, kill_at: int | None) -> Ended:
        self._reset()
        message_id = str(uuid4())
        ended = run_in_process(lambda: self._one_run(message_id), kill_at, self.alive)
        # A PostgreSQL backend continues for a moment after its client is gone, and keeps its locks.
        self.tables.run("SELECT pg_advisory_lock(%s)", (self.alive,))
        self.tables.run("SELECT pg_advisory_unlock(%s)", (self.alive,))
        if ended.returned not in (None, "done", "partial"):
            raise AssertionError(f"{self.sweep.name}: the run ended as {ended.returned}")
        self._expire_killed_run()
        try:
            run_to_the_end(self.sweep, self.argument, self.now, message_id)
        except AssertionError as error:
            error.add_note(_where(ended))
            raise
        return ended

    def _one_run(self, message_id: str) -> str:
        result = run_as(message_id, self.sweep, self.argument, self.now)
        return result.outcome if result.error is None else f"{result.outcome}: {result.reason}"

    def _problems_after(self, kill_at: int | None) -> tuple[Ended, list[str]]:
        ended = self._run(kill_at)
        problems = [str(difference) for difference in self.tables.differences("at_last", self.ignoring)]
        counts = progress_since(self.sweep, self.since)
        if counts != self.counts:
            problems.append(f"  counts are {counts} in total, those of an uninterrupted run are {self.counts}")
        if (seen := self._read_outside()) != self.seen:
            problems += [f"  outside: {seen!r}", f"  uninterrupted: {self.seen!r}"]
        return ended, problems

    def _read_outside(self) -> object:
        return self.outside() if self.outside else None

    def _reset(self) -> None:
        self.tables.restore("at_first")
        Run.delete().where(Run.id > self.since).execute()
        if self.restore:
            self.restore()

    def _expire_killed_run(self) -> None:
        """Make the killed run look lost, and release its lease."""
        Run.update(heartbeat_at=NOW - 2 * runs.SILENCE).where((Run.id > self.since) & Run.outcome.is_null()).execute()
        if self.sweep.lease is not None:
            store = RedisLeaseStore(shared_redis.get(), shared_redis.namespace)
            key = self.sweep.lease.key_for(self.argument)
            if (owner := store.owner(key)) is not None:
                store.release(key, owner)

    def _fail_at(self, ended: Ended, number: int, points: int, problems: list[str]) -> None:
        self._fail(f"does not survive a kill at point {number + 1} of {points}", [_where(ended), *problems])

    def _fail(self, what: str, lines: Sequence[str]) -> None:
        legend = "  (- only in an uninterrupted run, + only in this run)"
        raise AssertionError("\n".join([f"{self.sweep.name} {what}", *lines, legend]))


def _where(ended: Ended) -> str:
    if not ended.killed:
        return "  not killed"
    done = ended.points[-2] if len(ended.points) > 1 else "(nothing)"
    return f"  killed after:  {done}\n  killed before: {ended.points[-1]}\n  and then run to its end"
