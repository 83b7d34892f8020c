"""Stage that delivers due rows of the outbox, one claim of one subscription after another."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final

from peewee import fn

from housekeeping.core import events
from housekeeping.core.events import OutboxHandler
from housekeeping.core.telemetry.logs import logger as named_logger
from housekeeping.sweeps.ledger import outbox
from housekeeping.sweeps.ledger.models import OutboxRow
from housekeeping.sweeps.ledger.outbox import Stored
from housekeeping.sweeps.stages.stage import Backlog, Batch, BatchResult, Failure, StagePlan

logger = named_logger(__name__)

_SAMPLES: Final = 5
#: Limit for counting rows without a handler.
_COUNTED: Final = 10_000


@dataclass(slots=True)
class _Claim:
    """Outbox rows that one batch has claimed, grouped by the result of their delivery."""

    no_handler: int = 0
    delivered: list[Stored] = field(default_factory=list)
    failed: list[tuple[Stored, BaseException]] = field(default_factory=list)
    untried: list[Stored] = field(default_factory=list)


class OutboxStage:
    """Deliveries of one run. Subscriptions take turns, so that a slow one does not hold up the others."""

    name: Final = "outbox"

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
        rows = outbox.claim(*key, self.batch_size)
        if len(rows) >= self.batch_size:
            self._turns.append((key, handler))
        groups = deque(outbox.groups(rows))
        tried: dict[int, BaseException] = {}
        while groups:
            group = groups.popleft()
            try:
                outbox.deliver(handler, group)
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
        outbox.remove(claim.delivered)
        outbox.note_failures(claim.failed)
        outbox.release(claim.untried)
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
        unhandled = outbox.without_handler(_COUNTED)
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
