"""What a run would do now: by its very query, in one snapshot, without writing anything."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from housekeeping.foundation.clock import SYSTEM_CLOCK, Clock
from housekeeping.foundation.db import database, reaching_postgres
from housekeeping.sweeps.backlog import Backlog, backlog
from housekeeping.sweeps.batches import Batch
from housekeeping.sweeps.declaration import Sweep
from housekeeping.sweeps.results import RunResult
from housekeeping.sweeps.walk import as_cursor, initial_counts

#: Counted exactly up to here; beyond it the plan says "at least", so that it never takes minutes.
COUNT_LIMIT: Final = 1_000_000
_SAMPLES: Final = 5


@dataclass(frozen=True, slots=True)
class Plan:
    """What a run would find, at `now`.

    Attributes:
      stale: How many rows it would settle.
      batches: In how many statements, if it had the time.
      oldest, newest: The first order column of the first and last of them; null when there are none.
      samples: The order columns of the first few.
    """

    worker: str
    now: datetime
    stale: Backlog
    batches: int
    oldest: Any
    newest: Any
    samples: list[dict[str, Any]]

    def as_json(self) -> dict[str, Any]:
        """The object of ``housekeeping plan --json``."""
        return {
            "worker": self.worker,
            "now": self.now.isoformat(),
            "stale_rows": self.stale.rows,
            "exact": self.stale.exact,
            "batches": self.batches,
            "oldest": _plain(self.oldest),
            "newest": _plain(self.newest),
            "samples": self.samples,
        }


def plan(sweep: Sweep, clock: Clock = SYSTEM_CLOCK, limit: int = COUNT_LIMIT) -> Plan:
    """Look, and change nothing: one read-only transaction, no row in the ledger, no lease.

    Raises:
      DatabaseUnavailable: When PostgreSQL does not answer.
    """
    now = clock.now()
    names = [column.name for column in sweep.order]
    with reaching_postgres(), _snapshot():
        stale = backlog(sweep, now, limit)
        samples: Any = Batch(sweep, now, None).rows().limit(_SAMPLES).tuples()
        first = [dict(zip(names, as_cursor(row) or [], strict=True)) for row in samples]
        backwards = [column.desc() for column in sweep.order]
        last: Any = sweep.model.select(sweep.order[0]).where(sweep.stale(now)).order_by(*backwards).limit(1)
        newest = [value for (value,) in last.tuples()]
    return Plan(
        sweep.name,
        now,
        stale,
        batches=-(-stale.rows // sweep.batch_size),
        oldest=first[0][names[0]] if first else None,
        newest=newest[0] if newest else None,
        samples=first,
    )


def dry_run(sweep: Sweep, clock: Clock = SYSTEM_CLOCK) -> RunResult:
    """The plan in the form of a run's result: what would be counted if time were no limit."""
    started = clock.monotonic()
    planned = plan(sweep, clock)
    would = {sweep.action.counted_as[0]: planned.stale.rows, "batches": planned.batches}
    reason = None if planned.stale.exact else "counted_up_to_limit"
    counts = {**initial_counts(sweep), **would}
    return RunResult(sweep.name, "done", reason, None, planned.now, clock.monotonic() - started, counts, dry_run=True)


@contextmanager
def _snapshot() -> Iterator[None]:
    with database.atomic():
        database.execute_sql("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY")
        yield


def _plain(value: Any) -> Any:
    return None if value is None else (as_cursor((value,)) or [None])[0]
