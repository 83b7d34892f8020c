"""Workers that maintain the library's own tables, in the ledger of each database.

============  =====================================================================
              ``housekeeping.old_runs``: removes old rows
Source        docs/reference/ledger.md: 30 days
Runs          Every day at 03:20
Touches       ``housekeeping.runs`` (delete), ``housekeeping.leases`` (delete; after 30 days unused),
              ``housekeeping.rejections`` and their reports (delete; after 30 days and a day),
              ``housekeeping.alerts`` (delete; 30 days after their end),
              ``housekeeping.table_sizes`` (insert, update, delete: the size of each table)
Limits        1000 rows per statement, 60 s per run; the next run continues
At once       Safe: rows locked by another run are skipped
On failure    Retried; the next day's run does the same work
============  =====================================================================

============  =====================================================================
              ``housekeeping.outbox``: delivers events to their handlers
Source        docs/reference/events.md
Runs          Every minute
Touches       ``housekeeping.outbox`` (update, delete)
Limits        100 rows per claim, 30 s per run; the next run continues
At once       Safe: rows locked by another run are skipped
On failure    The row is retried, after 1 min at first and after 1 h at most
============  =====================================================================
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, Final

from peewee import fn

from housekeeping.core import events
from housekeeping.core.events import OutboxHandler
from housekeeping.core.logs import logger as named_logger
from housekeeping.ledger import outbox as ledger_outbox
from housekeeping.ledger.runs import PREDICATE
from housekeeping.ledger.schema import ActionRow, AlertRow, Completion, LeaseRow, OutboxRow, Rejection, Run, TableSize
from housekeeping.sweeps.actions import Delete
from housekeeping.sweeps.conditions import Row
from housekeeping.sweeps.declaration import Sweep
from housekeeping.sweeps.rows import Rows
from housekeeping.sweeps.stage import Backlog, Batch, BatchResult, Failure, StagePlan
from housekeeping.sweeps.values import Alerts, Guard, Limits

if TYPE_CHECKING:
    from housekeeping.ledger.table_sizes import CatalogTable

OLD_RUNS_SCHEDULE: Final = "20 3 * * *"  # once a day, at a quiet hour and not on the hour
KEPT_FOR: Final = timedelta(days=30)  # docs/reference/ledger.md
#: Not configurable: deleting the row of a lease fences off its holder, so the lease must be out of use for certain.
LEASES_KEPT_FOR: Final = timedelta(days=30)
#: A rejection that no run has seen for this long belongs to records or arguments that no longer exist.
REJECTIONS_KEPT_FOR: Final = timedelta(days=30)
#: Since the alert ended, or was last evaluated: its worker may be gone.
ALERTS_KEPT_FOR: Final = timedelta(days=30)
ACTIONS_KEPT_FOR: Final = timedelta(days=365)  # auditors ask for last year's; operators write few
OLD_RUNS_BATCH_SIZE: Final = 1000  # rows per statement; they are small, and no other session locks them

_later: Any = Run.alias("later")


def _has_open_run(lease: Row) -> Any:
    """Return whether a run holds the lease, even one that has crashed without another run having recorded that."""
    return fn.EXISTS(Run.select(Run.id).where(Run.outcome.is_null() & (Run.epoch == lease.epoch)))


def _has_fingerprint(run: Any) -> Any:
    return fn.JSONB_EXTRACT_PATH_TEXT(run.counts, PREDICATE).is_null(False)


def _has_last_fingerprint(run: Row) -> Any:
    """Return whether a run has its worker's last fingerprint.

    Without it, a worker that runs once a month would be new each time, and wait for a confirmation.
    """
    is_later = (_later.worker == run.worker) & (_later.id > run.id) & _has_fingerprint(_later)
    return _has_fingerprint(run) & ~fn.EXISTS(_later.select(_later.id).where(is_later))


def _aged(
    name: str,
    table: Any,
    column: str,
    kept_for: timedelta | None,
    counted_as: str,
    *,
    unless: Callable[[Row], Any] | None = None,
) -> Rows:
    """Return the stage that deletes the rows of a table some time after the time in a column."""

    def stale(row: Row, limit: datetime) -> Any:
        old = getattr(row, column) < limit
        return old if unless is None else old & ~unless(row)

    return Rows(table, stale=stale, order=column, age=kept_for, action=Delete(rows_counted_as=counted_as), name=name)


def _old_rows(sweep: Sweep) -> list[Any]:
    return [
        _aged(
            "runs",
            Run,
            "finished_at",
            timedelta(seconds=sweep.options["stale_after_s"]),
            "deleted_rows",
            unless=_has_last_fingerprint,
        ),
        _aged("leases", LeaseRow, "used_at", LEASES_KEPT_FOR, "deleted_leases", unless=_has_open_run),
        _aged("rejections", Rejection, "last_at", REJECTIONS_KEPT_FOR, "deleted_rejections"),
        _aged("actions", ActionRow, "at", ACTIONS_KEPT_FOR, "deleted_actions"),
        _aged("alerts", AlertRow, "seen_at", ALERTS_KEPT_FOR, "deleted_alerts"),
        _aged("completions", Completion, "expires_at", None, "deleted_completions"),
        SizesStage(),
    ]


class SizesStage:
    """Stage that stores the size of each table of the database, for `housekeeping coverage`."""

    name: Final = "table_sizes"
    batch_size: Final = 1
    counts: Final = ("sampled_tables",)
    progress_counts: Final = ()
    tables: Final = (TableSize,)

    def prepare(self, batch: Batch) -> list[CatalogTable]:
        """Read the sizes from the catalog."""
        from housekeeping.ledger.table_sizes import read_tables

        return read_tables()

    def apply(self, batch: Batch, found: list[CatalogTable]) -> BatchResult:
        """Store them; a repeated run of the same night stores nothing."""
        from housekeeping.ledger.table_sizes import store_sizes

        return BatchResult({"sampled_tables": store_sizes(found)})

    def after_commit(self, batch: Batch, result: BatchResult) -> None: ...

    def backlog(self, now: datetime, limit: int, argument: Any = None) -> Backlog:
        """Return 0, because the stage has no stale rows."""
        return Backlog(0)

    def oldest(self, now: datetime, argument: Any = None) -> None: ...

    def plan(self, now: datetime, limit: int, argument: Any = None) -> StagePlan:
        return StagePlan(self.name, Backlog(0), {})


old_runs: Final = Sweep(
    "housekeeping.old_runs",
    _old_rows,
    schedule=OLD_RUNS_SCHEDULE,
    limits=Limits(OLD_RUNS_BATCH_SIZE, timedelta(seconds=60)),
    guard=Guard(first_run=False),
    alerts=Alerts(late=timedelta(days=2)),  # of daily runs, one may be missed
    options={"stale_after_s": KEPT_FOR.total_seconds()},
)


logger = named_logger(__name__)

_SAMPLES: Final = 5
#: Limit for counting rows without a handler.
_COUNTED: Final = 10_000


@dataclass(slots=True)
class _Claim:
    """Outbox rows that one batch has claimed, grouped by the result of their delivery."""

    no_handler: int = 0
    delivered: list[OutboxRow] = field(default_factory=list)
    failed: list[tuple[OutboxRow, BaseException]] = field(default_factory=list)
    untried: list[OutboxRow] = field(default_factory=list)


class OutboxStage:
    """Deliveries of one run. Subscriptions take turns, so that a slow one does not hold up the others."""

    name: Final = "outbox"
    counts: Final = ("delivered_rows", "failed", "no_handler", "batches", "out_of_time")
    progress_counts: Final = ("delivered_rows",)
    tables: Final = (OutboxRow,)

    def __init__(self, batch_size: int) -> None:
        self.batch_size = batch_size
        self._turns: deque[tuple[tuple[str, str], OutboxHandler]] | None = None

    def resized(self, batch_size: int) -> OutboxStage:
        """Return this stage with another batch size; it keeps the subscriptions' turns."""
        self.batch_size = batch_size
        return self

    def prepare(self, batch: Batch) -> _Claim:
        """Claim rows of the next subscription and call its handler with them."""
        claim = _Claim()
        if self._turns is None:
            # In random order: each run may have time for one call only, and the next one must not begin with the same.
            turns = list(events.subscriptions().items())
            self._turns = deque(random.sample(turns, len(turns)))
            claim.no_handler = self._count_without_handler()
        if not self._turns:
            return claim
        key, handler = self._turns.popleft()
        rows = ledger_outbox.claim(*key, self.batch_size)
        if len(rows) >= self.batch_size:
            self._turns.append((key, handler))
        groups = deque(ledger_outbox.groups(rows))
        tried: dict[int, BaseException] = {}
        while groups:
            group = groups.popleft()
            try:
                ledger_outbox.deliver(handler, group)
            except Exception as error:
                if len(group) > 1:
                    groups.extendleft([row] for row in reversed(group))
                    tried |= dict.fromkeys((row.id for row in group), error)
                else:
                    claim.failed.append((group[0], error))
            else:
                claim.delivered += group
            if groups and batch.time_is_up():
                # A row that failed together with others keeps its attempt: after a few it is delivered alone.
                rest = [row for group in groups for row in group]
                claim.untried = [row for row in rest if row.id not in tried]
                claim.failed += [(row, tried[row.id]) for row in rest if row.id in tried]
                break
        return claim

    def apply(self, batch: Batch, claim: _Claim) -> BatchResult:
        """Delete the delivered rows and record the failures of the others."""
        ledger_outbox.remove(claim.delivered)
        ledger_outbox.note_failures(claim.failed)
        ledger_outbox.release(claim.untried)
        return BatchResult(
            {"delivered_rows": len(claim.delivered), "no_handler": claim.no_handler},
            exhausted=not (self._turns or claim.untried),
            failures=[Failure(_about(row), error) for row, error in claim.failed],
        )

    def after_commit(self, batch: Batch, result: BatchResult) -> None: ...

    def backlog(self, now: datetime, limit: int, argument: Any = None) -> Backlog:
        """Count all rows, including those that wait for a retry."""
        rows_up_to_limit = OutboxRow.select(OutboxRow.id).limit(limit + 1)
        rows: int = rows_up_to_limit.count()
        return Backlog(min(rows, limit), rows <= limit)

    def oldest(self, now: datetime, argument: Any = None) -> Any:
        first: Any = OutboxRow.select(OutboxRow.created_at).order_by(OutboxRow.id).limit(1).tuples()
        return next((at for (at,) in first), None)

    def plan(self, now: datetime, limit: int, argument: Any = None) -> StagePlan:
        due = OutboxRow.select(OutboxRow.id).where(OutboxRow.due_at <= now)
        rows: int = due.limit(limit + 1).count()
        newest = OutboxRow.select(fn.MAX(OutboxRow.created_at)).scalar()
        samples = OutboxRow.select().where(OutboxRow.due_at <= now).order_by(OutboxRow.id).limit(_SAMPLES)
        return StagePlan(
            self.name,
            Backlog(min(rows, limit), rows <= limit),
            {"delivered_rows": min(rows, limit)},
            self.oldest(now),
            newest,
            [_about(row) for row in samples],
        )

    def _count_without_handler(self) -> int:
        unhandled = ledger_outbox.without_handler(_COUNTED)
        for (event, name), rows in unhandled.items():
            logger.warning("No handler for rows in the outbox", subscribed_to=event, subscription=name, rows=rows)
        return sum(unhandled.values())


def _about(row: Any) -> dict[str, Any]:
    return {
        "delivery_id": row.id,
        "subscribed_to": row.event,
        "subscription": row.subscription,
        "attempts": row.attempts,
    }


OUTBOX_SCHEDULE: Final = "* * * * *"
OUTBOX_BATCH_SIZE: Final = 100  # rows per claim; after a kill they are delivered again, a minute later
OUTBOX_MAX_RUNTIME: Final = timedelta(seconds=30)  # below the first retry delay, after which rows are claimed again
OUTBOX_LARGEST_BACKLOG: Final = 10_000  # rows; a hundred full batches

outbox: Final = Sweep(
    "housekeeping.outbox",
    lambda sweep: OutboxStage(sweep.limits.batch),
    schedule=OUTBOX_SCHEDULE,
    limits=Limits(OUTBOX_BATCH_SIZE, OUTBOX_MAX_RUNTIME),
    # After an outage of a handler the backlog is far larger than usual, and all of it is to be delivered.
    guard=Guard(times_history=None, first_run=False),
    alerts=Alerts(backlog=OUTBOX_LARGEST_BACKLOG, most={"no_handler": 0}, late=timedelta(days=1)),
)

#: No tables of the application: HOUSEKEEPING_SCHEMA says where the library's own are.
MODELS: Final[dict[str, Any]] = {}
RIGHTS: Final[dict[str, tuple[str, ...]]] = {}
SWEEPS: Final = (old_runs, outbox)
