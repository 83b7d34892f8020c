"""Table of the stuck build workers, with the methods that drop a single build."""

from __future__ import annotations

from enum import IntEnum, StrEnum
from typing import Any, Final

from peewee import SQL, BigAutoField, BigIntegerField, Expression, IntegerField, TextField, fn

from housekeeping import (
    NaiveUtcDateTimeField,
    PartitionedModel,
    StateMachine,
    UtcDateTimeField,
    identify,
    statement_time,
)

#: The only type of row that these workers change; the table's other rows (bridges, external statuses) are not builds.
BUILD_TYPE: Final = "Ci::Build"
_LARGEST_INTEGER: Final = 2**31 - 1


class BuildStatus(StrEnum):
    """Status of a build."""

    CREATED = "created"
    PENDING = "pending"
    RUNNING = "running"
    SUCCESS = "success"
    FAILED = "failed"
    CANCELED = "canceled"
    SKIPPED = "skipped"
    MANUAL = "manual"
    SCHEDULED = "scheduled"
    PREPARING = "preparing"
    WAITING_FOR_RESOURCE = "waiting_for_resource"
    WAITING_FOR_CALLBACK = "waiting_for_callback"
    CANCELING = "canceling"


class FailureReason(IntEnum):
    """Reason why a build failed; NULL for an unknown failure."""

    SCRIPT_FAILURE = 1
    API_FAILURE = 2
    STUCK_OR_TIMEOUT_FAILURE = 3
    RUNNER_SYSTEM_FAILURE = 4
    STALE_SCHEDULE = 7
    JOB_EXECUTION_TIMEOUT = 8
    DATA_INTEGRITY_FAILURE = 12

    @property
    def label(self) -> str:
        """The name in documents and log lines."""
        return self.name.lower()


class Build(PartitionedModel):
    """Job of a pipeline."""

    id = BigAutoField()
    type = TextField()
    status = TextField()
    created_at = NaiveUtcDateTimeField(null=True)
    updated_at = NaiveUtcDateTimeField(null=True)
    finished_at = NaiveUtcDateTimeField(null=True)
    #: Start time of a delayed job; with a time zone, unlike the times above.
    scheduled_at = UtcDateTimeField(null=True)
    project_id = BigIntegerField(null=True)
    runner_id = BigIntegerField(null=True)
    name = TextField(null=True)
    stage = TextField(null=True)
    #: The pipeline's id.
    commit_id = BigIntegerField(null=True)
    #: A `FailureReason`, or a number of the application; NULL when unknown or not failed.
    failure_reason = IntegerField(null=True)
    lock_version = IntegerField(null=True, default=0, constraints=[SQL("DEFAULT 0")])

    class Meta:
        table_name = "ci_builds"
        #: Only labels of log lines, error reports and events. Upstream has already dropped `stage`.
        optional_fields = ("runner_id", "name", "stage", "commit_id")

    @classmethod
    def in_status(cls, status: BuildStatus) -> Expression:
        """Return the predicate for builds in this status."""
        return (cls.type == BUILD_TYPE) & (cls.status == status.value)

    def drop(self, reason: FailureReason | None = None) -> None:
        """Fail the build, unless it has ended.

        If the build was changed since it was read, it is read again and the drop is repeated, up to 3 times.

        Parameters:
          reason: None for an unknown failure.

        Raises:
          IllegalEvent: When the build has ended (success, failed, canceled, skipped); nothing is changed.
          RecordChanged: When another session changed it at every attempt, or it is gone; nothing is changed.

        Note: Sends no event, unlike the sweeps.
        """
        identify(type(self))
        changes = {Build.failure_reason: reason, **ended_at()}
        machine.fire(self, "drop", changes, version=Build.lock_version)

    def doom(self) -> None:
        """Fail a build with damaged data whatever its ``lock_version``, unless it has ended.

        Raises:
          IllegalEvent, RecordChanged: As for `drop`.
        """
        identify(type(self))
        version = (self.lock_version or 0) % _LARGEST_INTEGER + 1
        machine.fire(self, "doom", {**doomed_at(), Build.lock_version: version})


#: Statuses from which a build can fail; the others are final.
_UNFINISHED: Final = (
    BuildStatus.CREATED,
    BuildStatus.PENDING,
    BuildStatus.RUNNING,
    BuildStatus.SCHEDULED,
    BuildStatus.MANUAL,
    BuildStatus.PREPARING,
    BuildStatus.WAITING_FOR_RESOURCE,
    BuildStatus.WAITING_FOR_CALLBACK,
    BuildStatus.CANCELING,
)
machine: Final = StateMachine(
    Build.status,
    BuildStatus,
    {"drop": (_UNFINISHED, BuildStatus.FAILED), "doom": (_UNFINISHED, BuildStatus.FAILED)},
)


def ended_at() -> dict[Any, Any]:
    """Return the times of a build that ends now, column -> value."""
    return {column: statement_time(column) for column in (Build.finished_at, Build.updated_at)}


def doomed_at() -> dict[Any, Any]:
    """Return the changes to a doomed build, except its status and version: column -> value."""
    return {Build.failure_reason: FailureReason.DATA_INTEGRITY_FAILURE, **ended_at()}


def version_after_doom() -> Expression:
    """Return the next ``lock_version``, with 1 after the column's largest value."""
    following: Expression = fn.MOD(version(), _LARGEST_INTEGER) + 1
    return following


def version() -> Any:
    """Return the ``lock_version``, with 0 for the NULL of old rows."""
    return fn.COALESCE(Build.lock_version, 0)


Build.add_index(
    Build.index(
        Build.status,
        Build.created_at,
        Build.project_id,
        where=Build.type == BUILD_TYPE,
        name="index_ci_builds_on_status_and_created_at_and_project_id",
    )
)
