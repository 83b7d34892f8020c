"""The states of imports, entities and trackers, by the numbers the database has for them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import Enum, IntEnum
from typing import Any, Final

from peewee import SmallIntegerField

Events = Mapping[str, tuple[Iterable[Enum], Enum]]


class ImportStatus(IntEnum):
    """The states of an import, and of an entity."""

    CREATED = 0
    STARTED = 1
    FINISHED = 2
    TIMEOUT = 3
    FAILED = -1
    CANCELED = -2


class TrackerStatus(IntEnum):
    """The states of a tracker, which are numbered differently."""

    CREATED = 0
    STARTED = 1
    FINISHED = 2
    ENQUEUED = 3
    TIMEOUT = 4
    FAILED = -1
    SKIPPED = -2
    CANCELED = -3


class SourceType(IntEnum):
    """What an entity is a copy of."""

    GROUP_ENTITY = 0
    PROJECT_ENTITY = 1


#: "Any" (fail, cancel, skip) is every state, spelled out: workers.md means final ones and the target itself, too.
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
    """A ``smallint`` column that reads as a member of an enumeration; as the bare number when it is none of its."""

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
