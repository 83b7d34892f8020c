"""Times out imports without a change for a day, and stale entities with all their trackers.

============  =========================================================================================
Source        Batch design document 65, ``BulkImports::StaleImportWorker``
Runs          Every 4 hours; a row is stale 24 hours after its last change
Touches       ``bulk_imports``, ``bulk_import_entities``, ``bulk_import_trackers`` (status, updated_at)
Limits        1000 imports or 100 entities per transaction, 5 min per run; the next run resumes there
Concurrency   Safe: rows locked by another run or session are skipped, and entities with such a tracker
On failure    Retried up to 25 times; a row that cannot be changed is logged, reported and skipped
============  =========================================================================================
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any, ClassVar, Final

from peewee import OP, SQL, Expression, Function, Select, Value, fn

from housekeeping import (
    Alerts,
    Backlog,
    Batch,
    Event,
    ExplainQuery,
    Guard,
    Limits,
    RowLog,
    Stage,
    StagePlan,
    Sweep,
    TableStage,
    Transition,
    Write,
    current_database,
    events,
    statement_time,
)
from housekeeping.workers.bulk_imports.models import BulkImport, BulkImportEntity, BulkImportTracker, SourceType

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
        rows: Any = tracker.select(owner, tracker.id).where(open_trackers)
        rows = rows.for_update("FOR NO KEY UPDATE", skip_locked=True)
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


@dataclass(frozen=True, kw_only=True)
class EntityStage(TableStage):
    """Stage that locks the entities first, so that its statement sees all of their trackers.

    While an entity is locked, the foreign key prevents new trackers. An entity with a tracker that another session has
    locked or is changing is in use, so it is skipped with all of its trackers, without waiting.
    """

    builds_as_declared: ClassVar[bool] = True
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
        trackers: Any = BulkImportTracker.select(BulkImportTracker.id).where(_is_open(ids))
        trackers = trackers.for_update("FOR NO KEY UPDATE", skip_locked=True)
        return [
            *super().explain_queries(now),
            ExplainQuery("the trackers of its entities", trackers, BulkImportTracker),
        ]

    def plan(self, now: datetime, limit: int, argument: Any = None) -> StagePlan:
        entities = super().plan(now, limit, argument)
        stale = BulkImportEntity.select(BulkImportEntity.id).where(self.stale(now))
        trackers = BulkImportTracker.select(SQL("1")).where(_is_open(fn.ANY(stale))).limit(limit + 1)
        query: Any = trackers.select_from(fn.COUNT(SQL("1"))).tuples()
        found: int = next(iter(query.execute(current_database)))[0]
        exact = entities.stale.exact and found <= limit
        counts = {**entities.counts, TRACKERS_COUNTED_AS: min(found, limit)}
        return replace(entities, stale=Backlog(entities.stale.rows, exact), counts=counts)


def _is_open(entities: Function) -> Expression:
    """Return the predicate for trackers of these entities that have not ended, whatever their age."""
    machine = BulkImportTracker.machine
    is_open: Expression = (BulkImportTracker.bulk_import_entity == entities) & machine.field.in_(machine.sources(EVENT))
    return is_open


SCHEDULE: Final = "0 */4 * * *"  # document 65, 実行スケジュール
STALE_AFTER: Final = timedelta(hours=24)  # since the last change; document 65, 備考
LATE: Final = timedelta(days=1)  # six runs; no document has a number
PAGE_SIZE: Final = 1000  # imports per statement; docs/workers/bulk_imports.md: at most 1000 per page
BATCH_SIZE: Final = 100  # entities per transaction, each with its trackers; the library's default
MAX_RUNTIME: Final = timedelta(minutes=5)  # document 65, パフォーマンス要件: 数分以内 (within a few minutes)

#: Tables of this worker, by their names in the documents. Each refers only to tables before it.
MODELS: Final = {
    "bulk_imports": BulkImport,
    "bulk_import_entities": BulkImportEntity,
    "bulk_import_trackers": BulkImportTracker,
}

#: Rights that this worker needs on its tables.
RIGHTS: Final = {name: ("SELECT", "UPDATE (status, updated_at)") for name in MODELS}

IMPORT_LOG: Final = RowLog("BulkImport stale", {"bulk_import_id": "id"}, level=logging.ERROR)
ENTITY_LOG: Final = RowLog(
    "BulkImports::Entity stale",
    {
        "bulk_import_id": "bulk_import_id",
        "bulk_import_entity_id": "id",
        "bulk_import_entity_type": "bulk_import_entity_type",
        "source_full_path": "source_full_path",
    },
    level=logging.ERROR,
)


def stages(sweep: Sweep) -> Sequence[Stage]:
    """Return the two stages: imports, then entities. Whether an entity is stale does not depend on its import."""
    stale_after = timedelta(seconds=sweep.options["stale_after_s"])
    log_records = sweep.options["log_records"]
    return [
        TableStage(
            name="imports",
            stale=lambda now: BulkImport.stale(now - stale_after),
            # The cursor is the time before the change, so a changed row is not read again.
            order=(BulkImport.updated_at, BulkImport.id),
            action=Transition(
                BulkImport.machine, EVENT, "timed_out_imports", changes=lambda now: {BulkImport.updated_at: now}
            ),
            batch_size=sweep.options["page_size"],
            event=Event(events.import_timed_out, bulk_import_id="id"),
            row_log=IMPORT_LOG if log_records else None,
            counts=("timed_out_imports", "failed", "out_of_time"),
        ),
        EntityStage(
            name="entities",
            stale=lambda now: BulkImportEntity.stale(now - stale_after),
            order=(BulkImportEntity.updated_at, BulkImportEntity.id),
            action=TimeOut(),
            columns={
                "bulk_import_id": BulkImportEntity.bulk_import,
                "bulk_import_entity_type": BulkImportEntity.source_type,
                "source_full_path": BulkImportEntity.source_full_path,
            },
            batch_size=sweep.limits.batch,
            event=Event(events.entity_timed_out, "bulk_import_id", bulk_import_entity_id="id"),
            row_log=ENTITY_LOG if log_records else None,
            counts=("timed_out_entities", TRACKERS_COUNTED_AS, "failed", "out_of_time"),
        ),
    ]


sweep: Final = Sweep(
    "bulk_imports.stale_import",
    stages,
    schedule=SCHEDULE,
    limits=Limits(
        BATCH_SIZE,
        MAX_RUNTIME,
        # Rows that cannot be changed stay at the front. Enough of them would use up every run that starts there.
        resume="after_limit",
        batch_takes=None,
    ),
    guard=Guard(first_run=False),
    alerts=Alerts(late=LATE),
    options={"stale_after_s": STALE_AFTER.total_seconds(), "page_size": PAGE_SIZE, "log_records": True},
    actor={"feature_category": "importers", "data_consistency": "sticky"},
)

SWEEPS: Final = (sweep,)
