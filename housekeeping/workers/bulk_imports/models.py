"""Tables of bulk imports, and the states of their rows with their numbers in the database.

An import has entities (groups, projects), an entity has one tracker per relation.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime
from enum import Enum, IntEnum
from typing import TYPE_CHECKING, Any, ClassVar, Final

from peewee import (
    SQL,
    BigAutoField,
    BigIntegerField,
    BooleanField,
    Check,
    Expression,
    ForeignKeyField,
    IntegerField,
    ModelSelect,
    SmallIntegerField,
    TextField,
)

from housekeeping import SYSTEM_CLOCK, BaseModel, StateMachine, UtcDateTimeField, statement_time, update_rows

Events = Mapping[str, tuple[Iterable[Enum], Enum]]


class ImportStatus(IntEnum):
    """Status of an import or entity."""

    CREATED = 0
    STARTED = 1
    FINISHED = 2
    TIMEOUT = 3
    FAILED = -1
    CANCELED = -2


class TrackerStatus(IntEnum):
    """Status of a tracker; the numbers differ from those of an import."""

    CREATED = 0
    STARTED = 1
    FINISHED = 2
    ENQUEUED = 3
    TIMEOUT = 4
    FAILED = -1
    SKIPPED = -2
    CANCELED = -3


class SourceType(IntEnum):
    """Type of the source of an entity."""

    GROUP_ENTITY = 0
    PROJECT_ENTITY = 1


#: fail, cancel and skip are allowed from every state, including final ones (docs/workers/bulk_imports.md).
IMPORT_EVENTS: Final[Events] = {
    "start": ([ImportStatus.CREATED], ImportStatus.STARTED),
    "finish": ([ImportStatus.STARTED], ImportStatus.FINISHED),
    "cleanup_stale": ([ImportStatus.CREATED, ImportStatus.STARTED], ImportStatus.TIMEOUT),
    "fail": (list(ImportStatus), ImportStatus.FAILED),
    "cancel": (list(ImportStatus), ImportStatus.CANCELED),
}
IMPORT_ENDS: Final = (ImportStatus.FINISHED, ImportStatus.TIMEOUT, ImportStatus.FAILED, ImportStatus.CANCELED)

TRACKER_EVENTS: Final[Events] = {
    "enqueue": ([TrackerStatus.CREATED], TrackerStatus.ENQUEUED),
    "start": ([TrackerStatus.CREATED, TrackerStatus.ENQUEUED], TrackerStatus.STARTED),
    "retry": ([TrackerStatus.STARTED], TrackerStatus.ENQUEUED),
    "finish": ([TrackerStatus.STARTED], TrackerStatus.FINISHED),
    "cleanup_stale": (
        [TrackerStatus.CREATED, TrackerStatus.STARTED, TrackerStatus.ENQUEUED],
        TrackerStatus.TIMEOUT,
    ),
    "fail": (list(TrackerStatus), TrackerStatus.FAILED),
    "skip": (list(TrackerStatus), TrackerStatus.SKIPPED),
    "cancel": (list(TrackerStatus), TrackerStatus.CANCELED),
}
TRACKER_ENDS: Final = (
    TrackerStatus.FINISHED,
    TrackerStatus.TIMEOUT,
    TrackerStatus.FAILED,
    TrackerStatus.SKIPPED,
    TrackerStatus.CANCELED,
)


class IntEnumField(SmallIntegerField):
    """``smallint`` column whose values are members of an enumeration, or plain numbers if unknown."""

    def __init__(self, members: type[IntEnum], **options: Any) -> None:
        self.members = members
        super().__init__(**options)

    def db_value(self, value: Any) -> Any:
        return None if value is None else int(value)

    def python_value(self, value: Any) -> Any:
        try:
            return self.members(value)
        except ValueError:
            return value


class StatefulModel(BaseModel):
    """Record with a state machine.

    Each event is a method. It checks the state, sets `updated_at` and saves the record. `updated_at` becomes the
    database's time of the change, or the time of a `clock` that is given.

    Raises (every event):
      IllegalEvent: When the record's state does not allow the event.
      RecordChanged: When another session changed or deleted the record.
      In either case, and on a database error, nothing is saved.

    Note: Sends no event of `housekeeping.events`, unlike the sweep.
    """

    machine: ClassVar[StateMachine]

    class Meta:
        # Otherwise save() of another column could overwrite a newer status.
        only_save_dirty = True

    @classmethod
    def stale(cls, before: datetime) -> Expression:
        """Return the predicate for records that have not ended and were last changed before this time."""
        machine = cls.machine
        is_open: Expression = machine.field.in_(machine.sources("cleanup_stale"))
        return (cls.updated_at < before) & is_open

    def start(self) -> None:
        """Record that the work has started, and save the record."""
        self._fire("start")

    def finish(self) -> None:
        """Record that the work was completed."""
        self._fire("finish")

    def fail(self) -> None:
        """Record that the work failed; allowed from any state."""
        self._fire("fail")

    def cancel(self) -> None:
        """Record that the work was canceled; allowed from any state."""
        self._fire("cancel")

    def cleanup_stale(self) -> None:
        """Record that the work timed out."""
        self._fire("cleanup_stale")

    def _fire(self, event: str) -> None:
        model = type(self)
        model.machine.fire(self, event, {model.updated_at: statement_time(model.updated_at)})

    if TYPE_CHECKING:
        updated_at: UtcDateTimeField


class BulkImport(StatefulModel):
    """Import of groups and projects, started by a user."""

    id = BigAutoField()
    user_id = BigIntegerField()
    source_type = SmallIntegerField(default=0, constraints=[SQL("DEFAULT 0")])
    status = IntEnumField(ImportStatus, default=ImportStatus.CREATED)
    has_failures = BooleanField(default=False, constraints=[SQL("DEFAULT false")])
    created_at = UtcDateTimeField(default=SYSTEM_CLOCK.now, constraints=[SQL("DEFAULT now()")])
    updated_at = UtcDateTimeField(default=SYSTEM_CLOCK.now, constraints=[SQL("DEFAULT now()")])

    if TYPE_CHECKING:
        entities: ModelSelect[BulkImportEntity]

    class Meta:
        table_name = "bulk_imports"
        #: Over all partitions, too: it comes from one sequence.
        key_is_unique = True


class BulkImportEntity(StatefulModel):
    """Group or project of an import."""

    id = BigAutoField()
    bulk_import = ForeignKeyField(BulkImport, backref="entities", on_delete="CASCADE")
    parent = ForeignKeyField("self", backref="children", null=True, on_delete="CASCADE")
    namespace_id = BigIntegerField(null=True)
    project_id = BigIntegerField(null=True)
    organization_id = BigIntegerField(null=True)
    source_type = IntEnumField(SourceType)
    source_full_path = TextField()
    destination_name = TextField(default="", constraints=[SQL("DEFAULT ''")])
    destination_namespace = TextField(default="", constraints=[SQL("DEFAULT ''")])
    status = IntEnumField(ImportStatus, default=ImportStatus.CREATED)
    jid = TextField(null=True)
    has_failures = BooleanField(default=False, constraints=[SQL("DEFAULT false")])
    created_at = UtcDateTimeField(default=SYSTEM_CLOCK.now, constraints=[SQL("DEFAULT now()")])
    updated_at = UtcDateTimeField(default=SYSTEM_CLOCK.now, constraints=[SQL("DEFAULT now()")])

    if TYPE_CHECKING:
        bulk_import_id: int
        parent_id: int | None
        children: ModelSelect[BulkImportEntity]
        trackers: ModelSelect[BulkImportTracker]

    class Meta:
        table_name = "bulk_import_entities"
        #: Over all partitions, too: it comes from one sequence.
        key_is_unique = True
        #: Only labels of log lines.
        optional_fields = ("source_type", "source_full_path")
        constraints = (Check("num_nonnulls(namespace_id, project_id, organization_id) = 1"),)

    def cleanup_stale(self) -> None:
        """Time out the entity together with all trackers that have not ended, in one transaction.

        Waits up to ``lock_timeout`` for trackers that another session has locked.
        """
        event, at = "cleanup_stale", statement_time(BulkImportEntity.updated_at)
        trackers = BulkImportTracker.machine
        time_out_trackers = BulkImportTracker.update(
            {BulkImportTracker.status: trackers.target(event), BulkImportTracker.updated_at: at}
        ).where((BulkImportTracker.bulk_import_entity == self.id) & trackers.field.in_(trackers.sources(event)))
        changes = {BulkImportEntity.updated_at: at}
        self.machine.fire(self, event, changes, within_transaction=lambda: update_rows(time_out_trackers))


class BulkImportTracker(StatefulModel):
    """Progress of one relation of an entity (its members, its labels, ...)."""

    id = BigAutoField()
    # No index of its own: the unique index begins with this column.
    bulk_import_entity = ForeignKeyField(BulkImportEntity, backref="trackers", on_delete="CASCADE", index=False)
    relation = TextField()
    stage = IntegerField(default=0, constraints=[SQL("DEFAULT 0")])
    status = IntEnumField(TrackerStatus, default=TrackerStatus.CREATED)
    has_next_page = BooleanField(default=False, constraints=[SQL("DEFAULT false")])
    next_page = TextField(null=True)
    jid = TextField(null=True)
    created_at = UtcDateTimeField(null=True, default=SYSTEM_CLOCK.now)
    updated_at = UtcDateTimeField(null=True, default=SYSTEM_CLOCK.now)

    if TYPE_CHECKING:
        bulk_import_entity_id: int

    class Meta:
        table_name = "bulk_import_trackers"
        indexes = ((("bulk_import_entity", "relation"), True),)

    def enqueue(self) -> None:
        """Queue the work."""
        self._fire("enqueue")

    def retry(self) -> None:
        """Queue work that was started before."""
        self._fire("retry")

    def skip(self) -> None:
        """Skip the work; allowed from any state."""
        self._fire("skip")


BulkImport.machine = StateMachine(BulkImport.status, ImportStatus, IMPORT_EVENTS, IMPORT_ENDS)
BulkImportEntity.machine = StateMachine(BulkImportEntity.status, ImportStatus, IMPORT_EVENTS, IMPORT_ENDS)
BulkImportTracker.machine = StateMachine(BulkImportTracker.status, TrackerStatus, TRACKER_EVENTS, TRACKER_ENDS)

#: Statuses in the indexes that the sweep reads.
_STALE: Final = [ImportStatus.CREATED, ImportStatus.STARTED]

for _model in (BulkImport, BulkImportEntity):
    _model.add_index(
        _model.index(
            _model.updated_at,
            _model.id,
            where=_model.status.in_(_STALE),
            name=f"index_{_model._meta.table_name}_on_updated_at_and_id_for_stale",
        )
    )
