"""States of imports, entities and trackers, with their numbers in the database."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import Enum, IntEnum
from typing import Any, Final

from peewee import SmallIntegerField

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


class EnumField(SmallIntegerField):
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
