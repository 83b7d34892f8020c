"""Stage for stale entities: an entity and its open trackers change together or not at all."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, Final

from peewee import SQL, Expression, Function, IntegrityError, Model, Value, fn

from housekeeping.sweeps import Backlog, Batch, BatchResult, ExplainQuery, StagePlan, TableStage, database
from housekeeping.workers.bulk_imports.models import BulkImportEntity, BulkImportTracker
from housekeeping.workers.bulk_imports.states import SourceType

EVENT: Final = "cleanup_stale"
TRACKERS_COUNTED_AS: Final = "timed_out_trackers"

#: Times out the locked entities with their open trackers, except the entities with a tracker that cannot be locked.
#: `open` and `locked` are compared by their counts, one row per entity, so that the cost never grows with the square
#: of the trackers. A tracker that ends at this moment is in `open` only. The entities' staleness is checked again as
#: compare-and-set; coalesce() keeps PostgreSQL from reading the index of all stale rows for it.
_TIME_OUT: Final = """WITH open AS MATERIALIZED (
    SELECT bulk_import_entity_id AS entity_id, count(*) AS number FROM {trackers}
    WHERE bulk_import_entity_id = ANY(%(entities)s) AND status = ANY(%(open)s)
    GROUP BY bulk_import_entity_id
), locked_rows AS MATERIALIZED (
    SELECT id, bulk_import_entity_id AS entity_id FROM {trackers}
    WHERE bulk_import_entity_id = ANY(%(entities)s) AND status = ANY(%(open)s)
    FOR UPDATE SKIP LOCKED
), locked AS MATERIALIZED (
    SELECT entity_id, count(*) AS number FROM locked_rows GROUP BY entity_id
), timed_out AS (
    UPDATE {entities} SET status = %(entity_status)s, updated_at = statement_timestamp()
    WHERE id = ANY(%(entities)s)
    AND id NOT IN (SELECT busy.entity_id FROM (SELECT * FROM open EXCEPT SELECT * FROM locked) AS busy)
    AND coalesce(updated_at < %(stale_before)s AND status = ANY(%(stale)s), false)
    RETURNING id
), followed AS (
    UPDATE {trackers} SET status = %(tracker_status)s, updated_at = statement_timestamp()
    WHERE bulk_import_entity_id = ANY(%(entities)s) AND status = ANY(%(open)s)
    AND bulk_import_entity_id IN (SELECT id FROM timed_out)
    RETURNING id
)
SELECT (SELECT coalesce(array_agg(id), '{{}}') FROM timed_out),
       (SELECT count(*) FROM followed),
       (SELECT coalesce(sum(number), 0) FROM locked WHERE entity_id IN (SELECT id FROM timed_out))
"""


@dataclass(frozen=True, kw_only=True)
class EntityStage(TableStage):
    """Stage that locks a batch of entities with one statement and changes them and their trackers with a second one.

    The second statement's snapshot is taken while the locks are held, so it sees every tracker that was added before.
    Until the commit the foreign key prevents new ones. An entity with a tracker that another session has locked, or
    that changes at this moment, is being worked on: it is skipped as a whole, without waiting.

    Attributes:
      stale_before: Returns the time before which an entity must have changed to be stale, given the run's start.
    """

    stale_before: Any

    def apply(self, batch: Batch, taken: Any = None) -> BatchResult:
        """Lock the entities of a batch, and time out those whose open trackers can be locked."""
        rows = self.run_statement(batch, "lock", lambda batch: self.rows(batch).for_update(skip_locked=True))
        if not rows:
            return BatchResult({}, *self.position_after(batch, None, 0))
        entities, trackers = self._time_out([row[1] for row in rows], batch.now)
        changed = [row for row in rows if row[1] in entities] if self.needs_rows() else []
        return BatchResult(
            {self.action.counted_as[0]: len(entities), TRACKERS_COUNTED_AS: trackers},
            *self.position_after(batch, self.position_of(rows[-1]), len(rows)),
            rows=self.records(changed),
        )

    def _time_out(self, entities: list[int], now: datetime) -> tuple[set[int], int]:
        """Return the ids of the changed entities, and the number of changed trackers.

        Raises:
          IntegrityError: When a trigger or rule of the application kept a tracker from changing without an error. The
            batch is rolled back, so that no entity changes without its trackers.
        """
        entity, tracker = BulkImportEntity.machine, BulkImportTracker.machine
        statement = _TIME_OUT.format(entities=_table(BulkImportEntity), trackers=_table(BulkImportTracker))
        parameters = {
            "entities": entities,
            "stale": _numbers(entity.sources(EVENT)),
            "open": _numbers(tracker.sources(EVENT)),
            "entity_status": int(entity.target(EVENT)),
            "tracker_status": int(tracker.target(EVENT)),
            "stale_before": self.stale_before(now),
        }
        timed_out, followed, locked = database.execute_sql(statement, parameters).fetchone()
        if followed != locked:
            raise IntegrityError(f"{locked - followed} tracker(s) did not change with their entity")
        return set(timed_out), followed

    def record(self, row: tuple[Any, ...]) -> dict[str, Any]:
        """Return the row for events and log lines, with its type by name."""
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


def _numbers(statuses: Any) -> list[int]:
    return [int(status) for status in statuses]


def _table(model: type[Model]) -> str:
    meta: Any = model._meta
    return ".".join(f'"{name}"' for name in (meta.schema, meta.table_name) if name)
