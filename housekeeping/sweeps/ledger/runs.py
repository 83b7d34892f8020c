"""Writes to the ledger row of an open run, in the transaction of the work that it counts."""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final, Literal

from peewee import Query, Value, fn

from housekeeping.core.errors import LeaseLost, RunTakenOver
from housekeeping.database.compiled_query import CompiledQuery, Parameter, QueryCache
from housekeeping.database.connection import database
from housekeeping.leases.fencing import Fence, is_of
from housekeeping.sweeps.ledger.models import NOW, Lease, Run
from housekeeping.sweeps.ledger.overrides import OVERRIDE, Override, override_from

Trigger = Literal["schedule", "enqueue", "cli", "parent"]
Outcome = Literal["done", "partial", "skipped", "failed", "lost_lease", "lost", "missed"]
#: Which runs a new one resumes: none, an interrupted one, or also one that reached its limits.
Resume = Literal["never", "interrupted", "cut_short"]
Counts = dict[str, Any]
#: Stage of a run and position in it: ``{"pass": ..., "after": [...]}``.
Cursor = dict[str, Any]

#: Maximum interval between heartbeats; each batch is one.
HEARTBEAT: Final = timedelta(seconds=20)
#: Three missed heartbeats: the run is then considered dead. A single late one may be a slow statement or network.
SILENCE: Final = 3 * HEARTBEAT
#: Key in a run's counts of the fingerprint of its predicate. It is not a count, and not shown.
PREDICATE: Final = "predicate"
#: Key in a run's counts of what a purge was asked to do. It is not a count either.
PURGE: Final = "purge"
#: Key in a run's counts of the run whose rows it restores, and of the condition on them. No count either.
RESTORE: Final = "restore"
#: Reasons of runs that something outside of them ended early. The next run resumes where they stopped.
STOPPED: Final = ("shutdown", "paused", "gate")


@dataclass(frozen=True, slots=True)
class Closed:
    """End of a run, as its closed row has it."""

    outcome: Outcome
    reason: str | None
    counts: Counts


def advance(run_id: int, counts: Counts, cursor: Cursor | None, fence: Fence | None) -> Override | None:
    """Write counts and cursor in the batch's transaction, and return the worker's override, if any.

    Raises:
      RunTakenOver: Another run considered this one dead; the caller's transaction must roll back.
      LeaseLost: Another holder has begun since; likewise.
    """
    return _write(run_id, fence, counts=counts, cursor=cursor, heartbeat_at=NOW)


def beat(run_id: int) -> Override | None:
    """Write a heartbeat, and return the worker's override, if any. Requires a transaction.

    Raises:
      RunTakenOver: Another run considered this one dead.
    """
    return _write(run_id, None, heartbeat_at=NOW)


def check(run_id: int) -> None:
    """Raise unless the run's row is still open; one round trip.

    Raises:
      RunTakenOver: Another run considered this one dead.
    """
    still_open = _writes.get(
        Run._meta.schema, "open", lambda: CompiledQuery(Run.select(Run.id).where(is_open(Parameter(0))))
    )
    if not still_open.rows(run_id):
        raise taken_over(run_id)


def finish(
    run_id: int,
    outcome: Outcome,
    reason: str | None,
    *,
    counts: Counts,
    cursor: Cursor | None,
    fence: Fence | None = None,
) -> None:
    """Close the run's row in the transaction of its last batch.

    Raises:
      RunTakenOver, LeaseLost: As `advance`.
    """
    _write(
        run_id,
        fence,
        counts=counts,
        cursor=cursor,
        heartbeat_at=NOW,
        outcome=outcome,
        reason=reason,
        finished_at=NOW,
    )


#: Compiled statements on runs, by their columns, for each schema.
_writes: Final = QueryCache()


def _write(run_id: int, fence: Fence | None, **columns: Any) -> Override | None:
    given = {name: value for name, value in columns.items() if value is not NOW}
    form = (tuple(columns), tuple(given), fence is None)
    statement = _writes.get(Run._meta.schema, form, lambda: CompiledQuery(_writing(columns, given, fence)))
    values = [Run._meta.fields[name].db_value(value) for name, value in given.items()]
    for worker, override in statement.rows(run_id, *(fence or (None, None, None)), *values):
        return override_from(worker, override)
    if fence is not None and Run.select(Run.id).where(is_open(run_id)).exists():
        raise LeaseLost(f"lease {fence.key!r} has been taken by another holder since epoch {fence.epoch}")
    raise taken_over(run_id)


def taken_over(run_id: int) -> RunTakenOver:
    return RunTakenOver(f"run {run_id} was considered dead and has been taken over")


def is_open(run_id: Any) -> Any:
    return (Run.id == run_id) & Run.outcome.is_null()


def _writing(columns: dict[str, Any], given: dict[str, Any], fence: Fence | None) -> Query:
    """Return the update of an open run. Its parameters are run id, fence, and the given columns."""
    run_id, key, epoch, holder = (Parameter(number) for number in range(4))
    condition = is_open(run_id)
    if fence is not None:
        # FOR SHARE: a new holder gets its epoch only after this batch has ended.
        held = Lease.select(Lease.key).where(is_of(key, epoch, holder)).for_update("FOR SHARE")  # type: ignore[arg-type]
        condition &= fn.EXISTS(held)
    places = {name: Parameter(number) for number, name in enumerate(given, start=4)}
    query: Query = Run.update(**{**columns, **places}).where(condition).returning(Run.worker, OVERRIDE).tuples()
    return query


def fail(
    run_id: int, outcome: Outcome, reason: str, error: str | None, extra: Counts, traceback: str | None = None
) -> Closed:
    """Close the row of a run that an error ended, keep the counts of its last committed batch, and return the row.

    A row that was already closed stays unchanged. A COMMIT whose answer was lost may have closed it, or have counted
    more than the run knows.
    """
    with database.atomic():
        Run.update(
            outcome=outcome,
            reason=reason,
            error=error,
            traceback=traceback,
            finished_at=NOW,
            heartbeat_at=NOW,
            # What a COMMIT without an answer has counted stays.
            counts=Value(json.dumps(extra)).cast("jsonb").concat(Run.counts),
        ).where(is_open(run_id)).execute()
        row: Any = Run.select(Run.outcome, Run.reason, Run.counts).where(Run.id == run_id).tuples().get()
    return Closed(*row)
