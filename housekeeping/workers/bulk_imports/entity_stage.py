"""Stage for stale entities: an entity and its open trackers change together or not at all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, Final

from peewee import OP, SQL, Expression, Function, Select, Value, fn

from housekeeping.sweeps import (
    Backlog,
    Batch,
    BatchResult,
    ExplainQuery,
    StagePlan,
    TableStage,
    Write,
    database,
    statement_time,
)
from housekeeping.workers.bulk_imports.models import BulkImportEntity, BulkImportTracker
from housekeeping.workers.bulk_imports.states import SourceType

EVENT: Final = "cleanup_stale"
TRACKERS_COUNTED_AS: Final = "timed_out_trackers"


@dataclass(frozen=True, slots=True)
class TimeOut:
    """Action that times out entities with their open trackers, except those with a tracker that cannot be locked.

    For each entity, the number of open trackers is compared with the number of locked ones; comparing the trackers
    themselves could cost the square of their number. A tracker that ends at this moment is counted as open only. If a
    trigger or rule of the application keeps a tracker from changing, the batch is undone, so that no entity changes
    without its trackers.
    """

    @property
    def counted_as(self) -> Sequence[str]:
        return ("timed_out_entities", TRACKERS_COUNTED_AS)

    def write(self, table: TableStage, batch: Batch, chosen: Expression) -> Write:
        tracker, entity = BulkImportTracker, BulkImportEntity
        owner = tracker.bulk_import_entity.alias("entity_id")
        open_trackers = _is_open(fn.ANY(table.locked_keys))
        number = fn.COUNT(SQL("*")).alias("number")
        found: Any = tracker.select(owner, number).where(open_trackers).group_by(tracker.bulk_import_entity)
        found = found.cte("open_trackers", materialized=True)
        rows: Any = tracker.select(owner, tracker.id).where(open_trackers).for_update(skip_locked=True)
        rows = rows.cte("locked_trackers", materialized=True)
        locked: Any = Select((rows,), [rows.c.entity_id, number]).group_by(rows.c.entity_id)
        locked = locked.cte("locked", materialized=True)
        each = [Select((one,), [one.c.entity_id, one.c.number]) for one in (found, locked)]
        busy: Any = (each[0] - each[1]).cte("busy", materialized=True)
        timed_out: Any = (
            entity.update(
                {
                    entity.machine.field: entity.machine.target(EVENT),
                    entity.updated_at: statement_time(entity.updated_at),
                }
            )
            .where(chosen & entity.id.not_in(Select((busy,), [busy.c.entity_id])))
            .returning(*table.key)
        ).cte("timed_out")
        changed = Select((timed_out,), [timed_out.c.id])

        def is_of_changed(column: Any) -> Any:
            # COALESCE keeps PostgreSQL from comparing each tracker with each entity, which it may for a few rows.
            return fn.COALESCE(column.in_(changed), False)

        followed: Any = (
            tracker.update(
                {
                    tracker.machine.field: tracker.machine.target(EVENT),
                    tracker.updated_at: statement_time(tracker.updated_at),
                }
            )
            .where(open_trackers & is_of_changed(tracker.bulk_import_entity))
            .returning(tracker.id)
        ).cte("followed")
        of_changed = Select((locked,), [fn.COALESCE(fn.SUM(locked.c.number), 0)]).where(
            is_of_changed(locked.c.entity_id)
        )
        return Write(
            [timed_out, followed],
            self.counted_as,
            before=[found, rows, locked, busy],
            holds=Expression(Select((followed,), [fn.COUNT(SQL("*"))]), OP.EQ, of_changed),
        )

    def fallback(self, table: TableStage, batch: Batch, error: BaseException) -> BatchResult | None:
        return None


@dataclass(frozen=True, kw_only=True)
class EntityStage(TableStage):
    """Stage that locks the entities first, so that its statement sees all of their trackers.

    While an entity is locked, the foreign key prevents new trackers. An entity with a tracker that another session has
    locked or is changing is in use, so it is skipped with all of its trackers, without waiting.
    """

    locks_first: bool = True

    def record(self, row: tuple[Any, ...]) -> dict[str, Any]:
        """Return the row for events and log lines, with the name of its source type."""
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
    """Return the predicate for trackers of these entities that have not ended, whatever their age."""
    machine = BulkImportTracker.machine
    is_open: Expression = (BulkImportTracker.bulk_import_entity == entities) & machine.field.in_(machine.sources(EVENT))
    return is_open
