"""The pass through stale entities: an entity and its trackers change together, or none of them does."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, Final

from peewee import CTE, SQL, Expression, Function, IntegrityError, Query, Select, Value, fn

from housekeeping.sweeps import (
    Backlog,
    Batch,
    BatchResult,
    ExplainQuery,
    Parameter,
    StagePlan,
    TableStage,
    database,
    statement_time,
)
from housekeeping.workers.bulk_imports.models import BulkImportEntity, BulkImportTracker
from housekeeping.workers.bulk_imports.states import SourceType

EVENT: Final = "cleanup_stale"
TRACKERS_COUNTED_AS: Final = "timed_out_trackers"


@dataclass(frozen=True, kw_only=True)
class EntityStage(TableStage):
    """Two statements a batch: one locks the entities, one changes them with their trackers.

    The second statement's snapshot is taken when the locks are held, so it sees every tracker that was added before
    them; until the commit the foreign key lets none be added. An entity with a tracker that is locked elsewhere, or
    that changes at this very moment, is at work after all: it is left out whole and never waited for.
    """

    def apply(self, batch: Batch, prepared: Any = None) -> BatchResult:
        found = self.run_statement(batch, "lock", lambda batch: self.rows(batch).for_update(skip_locked=True))
        if not found:
            return BatchResult({}, *self.position_after(batch, None, 0))
        entities, trackers = self._time_out(batch, [row[1] for row in found])
        changed = [row for row in found if row[1] in entities] if self.needs_rows() else []
        return BatchResult(
            {self.action.counted_as[0]: len(entities), TRACKERS_COUNTED_AS: trackers},
            *self.position_after(batch, self.position_of(found[-1]), len(found)),
            rows=[self.record(self.read(row)) for row in changed],
        )

    def _time_out(self, batch: Batch, locked: list[int]) -> tuple[set[int], int]:
        """Change the locked entities but those with a tracker that could not be locked; returns their ids, and how
        many trackers went with them.

        Raises:
          IntegrityError: When the database kept a tracker from changing without an error (a trigger or rule of the
            application's); the entities must not change then either.
        """
        # One parameter, not a hundred: putting the statement together would take longer than carrying it out.
        ids = fn.ANY(Parameter(0))
        statement = self.statements.get(self.purpose(batch), "time out", lambda: self._timing_out(batch.now, ids))
        moved, trackers, should_be = statement.rows(locked)[0]
        if trackers != should_be:
            raise IntegrityError(f"{should_be - trackers} tracker(s) did not change with their entity")
        return set(moved), trackers

    def _timing_out(self, now: datetime, locked: Function) -> Query:
        there, mine, ours, left_out = _compared(locked)
        entity, tracker = BulkImportEntity.machine, BulkImportTracker.machine
        update: Any = BulkImportEntity.update(
            {
                BulkImportEntity.status: entity.target(EVENT),
                BulkImportEntity.updated_at: statement_time(BulkImportEntity.updated_at),
            }
        )
        # What is changed is stale at the moment it is changed: the predicate once more, as compare-and-set. COALESCE
        # keeps it from choosing the index: with old statistics, all that is stale would be looked through each time.
        still_stale = fn.COALESCE(self.stale(now), False)
        may_change = (BulkImportEntity.id == locked) & BulkImportEntity.id.not_in(left_out) & still_stale
        moved: CTE = update.where(may_change).returning(BulkImportEntity.id).cte("moved")
        moved_ids = Select((moved,), (moved.c.id,))
        # Of a moved entity, all that this finds are locked; the ids once more, so that the index on them is used.
        follow: Any = BulkImportTracker.update(
            {
                BulkImportTracker.status: tracker.target(EVENT),
                BulkImportTracker.updated_at: statement_time(BulkImportTracker.updated_at),
            }
        ).where(_is_open(locked) & BulkImportTracker.bulk_import_entity.in_(moved_ids))
        followed: CTE = follow.returning(BulkImportTracker.id).cte("followed")
        ids = fn.COALESCE(fn.ARRAY_AGG(moved.c.id), SQL("'{}'"))
        changed = Select((followed,), (fn.COUNT(SQL("*")),))
        expected = Select((ours,), (fn.COALESCE(fn.SUM(ours.c.number), 0),)).where(ours.c.entity_id.in_(moved_ids))
        return Select((moved,), (ids, changed, expected)).with_cte(there, mine, ours, moved, followed)

    def record(self, row: tuple[Any, ...]) -> dict[str, Any]:
        record = super().record(row)
        kind = record.get("bulk_import_entity_type")
        if kind is None:
            return record
        return record | {"bulk_import_entity_type": kind.name.lower() if isinstance(kind, SourceType) else str(kind)}

    def explain_queries(self, now: datetime) -> list[ExplainQuery]:
        ids = fn.ANY(Value([1], converter=False, unpack=False))
        trackers = BulkImportTracker.select(BulkImportTracker.id).where(_is_open(ids)).for_update(skip_locked=True)
        return [
            *super().explain_queries(now),
            ExplainQuery("the trackers of its entities", trackers, BulkImportTracker),
        ]

    def plan(self, now: datetime, limit: int, argument: Any = None) -> StagePlan:
        entities = super().plan(now, limit, argument)
        stale = BulkImportEntity.select(BulkImportEntity.id).where(self.stale(now))
        trackers = BulkImportTracker.select(SQL("1")).where(_is_open(fn.ANY(stale))).limit(limit + 1)
        query: Any = trackers.select_from(fn.COUNT(SQL("1"))).tuples()
        found: int = next(iter(query.execute(database)))[0]
        exact = entities.stale.exact and found <= limit
        counts = {**entities.counts, TRACKERS_COUNTED_AS: min(found, limit)}
        return replace(entities, stale=Backlog(entities.stale.rows, exact), counts=counts)


def _is_open(entities: Function) -> Expression:
    """That a tracker is any of these entities' and not at an end, whatever its age."""
    machine = BulkImportTracker.machine
    is_open: Expression = (BulkImportTracker.bulk_import_entity == entities) & machine.field.in_(machine.sources(EVENT))
    return is_open


def _compared(entities: Function) -> tuple[CTE, CTE, CTE, Select]:
    """The open trackers that are there, those of them that can be locked, and the entities for which these are fewer.

    Compared by their numbers, an entity a row: whatever the planner thinks of a CTE, nothing then grows with the square
    of the trackers. A tracker that ends at this moment is no longer among those that can be locked.
    """
    of_entity = BulkImportTracker.bulk_import_entity.alias("entity_id")
    number = fn.COUNT(SQL("*")).alias("number")
    found = BulkImportTracker.select(of_entity, number).where(_is_open(entities))
    there = found.group_by(BulkImportTracker.bulk_import_entity).cte("there", materialized=True)
    open_ones = BulkImportTracker.select(BulkImportTracker.id, of_entity).where(_is_open(entities))
    mine = open_ones.for_update(skip_locked=True).cte("mine", materialized=True)
    ours = Select((mine,), (mine.c.entity_id, number)).group_by(mine.c.entity_id).cte("ours", materialized=True)
    left_out = (
        Select((there,), (there.c.entity_id, there.c.number)) - Select((ours,), (ours.c.entity_id, ours.c.number))
    ).alias("left_out")
    return there, mine, ours, Select((left_out,), (left_out.c.entity_id,))
