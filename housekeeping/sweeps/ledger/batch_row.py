"""Ledger's part of a batch that is one statement. If its answer is lost, the ledger knows whether it was committed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from peewee import CTE, SQL, Case, Select, fn

from housekeeping.database.connection import database
from housekeeping.leases.fencing import Fence, is_of
from housekeeping.sweeps.ledger.models import NOW, Lease, Run
from housekeeping.sweeps.ledger.overrides import OVERRIDE
from housekeeping.sweeps.ledger.runs import Counts, Cursor, is_open, taken_over


@dataclass(frozen=True, slots=True)
class Resynchronized:
    """State of the ledger row after a batch whose answer was lost."""

    is_closed: bool
    counts: Counts
    cursor: Cursor | None


def advance_cte(
    run_id: int, fence: Fence | None, numbers: CTE, *, counts: Any, cursor: Any, is_done: Any, heartbeat: Any
) -> tuple[CTE, CTE]:
    """Return two CTEs for the statement of a batch: the update of the run's row, and the check of run and lease.

    The second one is empty if the run was taken over or its lease has a newer holder. The statement must then fail.
    The first one returns the worker's override as JSON and the time of the heartbeat.

    Parameters:
      numbers: What the batch has done, as one row. The other parameters may use its columns.
      counts, cursor: SQL for the new values.
      is_done: SQL that is true if the run ends as done with this batch.
      heartbeat: SQL for the heartbeat that the row must have; NULL: any. If the statement's answer is lost while the
        server is still executing it, it can then not commit after `resynchronize`.
    """
    run = (
        Run.update(
            counts=counts,
            cursor=cursor,
            heartbeat_at=NOW,
            outcome=Case(None, [(is_done, "done")]),
            finished_at=Case(None, [(is_done, NOW)]),
        )
        .from_(numbers)
        .where(is_open(run_id) & (heartbeat.is_null() | (Run.heartbeat_at == heartbeat)))
    )
    beat = Run.heartbeat_at.cast("text").alias("heartbeat_at")
    advanced = run.returning(OVERRIDE.alias("override"), beat).cte("advanced")
    if fence is None:
        return advanced, Select((advanced,), [SQL("1")]).cte("accepted")
    # FOR SHARE: a new holder gets its epoch only after this batch has ended. The run's row is locked first, as `begin`
    # does, so that the two cannot wait for each other.
    held = is_of(*fence) & fn.EXISTS(Select((advanced,), [SQL("1")]))
    return advanced, Lease.select(Lease.key).where(held).for_update("FOR SHARE").cte("accepted")  # type: ignore[arg-type]


def resynchronize(run_id: int, heartbeat: str) -> Resynchronized | None:
    """Return what the row holds after an answer was lost; None if nothing was committed.

    Writes a new heartbeat, so that a statement that the server is still executing can no longer commit. If that
    statement has locked the run's row already, waits for it.

    Parameters:
      heartbeat: The row's heartbeat before the statement.

    Raises:
      RunTakenOver: Another run considered this one dead.
      peewee.PeeweeException: The database cannot be reached.
    """
    with database.atomic():
        columns = (Run.outcome, Run.counts, Run.cursor, Run.heartbeat_at.cast("text"))
        row: Any = Run.select(*columns).where(Run.id == run_id).for_update().tuples().first()
        if row is None or row[0] not in (None, "done"):
            raise taken_over(run_id)
        if row[0] is None:
            Run.update(heartbeat_at=NOW).where(Run.id == run_id).execute()
        return None if row[3] == heartbeat else Resynchronized(row[0] == "done", row[1], row[2])
