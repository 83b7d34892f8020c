"""Stage for the stuck builds of one status: drop them in batches, and doom the builds that cannot be dropped."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from peewee import CTE, Expression, Select, Tuple, fn

from housekeeping.core import events
from housekeeping.sweeps import (
    Announcement,
    Batch,
    BatchResult,
    Failure,
    Position,
    RowLog,
    Sweep,
    TableStage,
    Write,
    database,
    error_line,
    key_of,
)
from housekeeping.sweeps import logger as named_logger
from housekeeping.workers.ci_stuck_builds.models import (
    Build,
    BuildStatus,
    FailureReason,
    doomed_at,
    ended_at,
    machine,
    version,
    version_after_doom,
)

logger = named_logger(__name__)

#: Fields of a build in error reports (document 6, エラー処理).
_ABOUT = ("build_id", "build_name", "build_stage", "pipeline_id", "project_id")


def stuck_builds(
    sweep: Sweep, status: BuildStatus, outdated: Callable[[datetime], Expression], reason: FailureReason
) -> BuildsStage:
    """Return the stage for the outdated builds of a status.

    Parameters:
      outdated: The predicate for such builds, given the time before which a build is outdated.
    """
    stale_after = sweep.stale_after
    assert stale_after is not None
    key = key_of(Build)
    # If the primary key has more columns than the id, log all of them.
    key_names = tuple(column.name for column in key if column is not Build.id)
    row_log = RowLog(
        event="Dropping outdated build",
        fields={name: name for name in ("build_id", "runner_id", *key_names)},
        constants={"status": status.value, "failure_reason": reason.label},
    )
    return BuildsStage(
        name=status.value,
        stale=lambda now: Build.in_status(status) & outdated(now - stale_after),
        order=(Build.created_at, Build.project_id, *key),  # document 6, 備考
        action=Drop(status, reason),
        batch_size=sweep.batch_size,
        columns={
            "runner_id": Build.runner_id,
            "build_name": Build.name,
            "build_stage": Build.stage,
            "pipeline_id": Build.commit_id,
            "lock_version": Build.lock_version,
        },
        event=(events.build_dropped, ("build_id", "project_id", "pipeline_id", "failure_reason", *key_names)),
        row_log=row_log if sweep.options["log_records"] else None,
        reason=reason,
    )


@dataclass(frozen=True, kw_only=True)
class BuildsStage(TableStage):
    """Stage that drops builds.

    Attributes:
      reason: The failure reason of dropped builds.
    """

    reason: FailureReason

    def among(self, picked: CTE) -> Expression:
        """Return the predicate for the picked rows, in the version that was picked."""
        keys = [getattr(picked.c, column.column_name) for column in self.key]
        chosen = Select((picked,), [*keys, fn.COALESCE(picked.c.lock_version, 0)])
        among: Expression = Tuple(*self.key, version()).in_(chosen)
        return among

    def record(self, row: tuple[Any, ...]) -> dict[str, Any]:
        record = super().record(row)
        return {**record, "build_id": record["id"], "failure_reason": self.reason}

    def describe(self, position: Position) -> dict[str, Any]:
        """Return the fields of the build for error reports."""
        columns = (*self.order, *self.columns.values())
        found = Build.select(*columns).where(self.is_one_of([position])).tuples().first()
        return super().describe(position) if found is None else self.about(self.record(found))

    def about(self, record: dict[str, Any]) -> dict[str, Any]:
        """Return the fields of a record for error reports."""
        key_names = (column.name for column in self.key if column is not Build.id)
        return {name: record[name] for name in (*_ABOUT, *key_names) if name in record}

    def after_commit(self, batch: Batch, result: BatchResult) -> None:
        super().after_commit(batch, result)
        for each in result.rescued:
            logger.error("Build could not be dropped and is doomed", **each.record, error=error_line(each.error))

    def announcements(self, result: BatchResult) -> Sequence[Announcement]:
        reason = FailureReason.DATA_INTEGRITY_FAILURE
        not_in_event = ("build_name", "build_stage")
        doomed = [
            {
                **{name: value for name, value in each.record.items() if name not in not_in_event},
                "failure_reason": reason,
            }
            for each in result.rescued
        ]
        return [*super().announcements(result), Announcement(events.build_doomed, doomed)]


@dataclass(frozen=True, slots=True)
class Drop:
    """Action that fails the builds of a batch, and dooms a build whose update fails."""

    status: BuildStatus
    reason: FailureReason

    @property
    def counted_as(self) -> Sequence[str]:
        return ("dropped",)

    def write(self, table: TableStage, batch: Batch, chosen: Expression) -> Write:
        update: Any = (
            Build.update(
                {
                    Build.status: machine.target("drop"),
                    Build.failure_reason: self.reason,
                    **ended_at(),
                    Build.lock_version: version() + 1,
                }
            )
            .where(chosen & Build.status.in_(machine.sources("drop")))
            .returning(*table.key)
        )
        return Write([update.cte("dropped")], self.counted_as)

    def fallback(self, table: TableStage, batch: Batch, error: BaseException) -> BatchResult | None:
        """Doom the only build of the batch if it can still be dropped; otherwise leave it."""
        assert isinstance(table, BuildsStage)
        found: Any = table.rows(batch).for_update(skip_locked=True).tuples()
        for row in found.execute(database):
            record = table.about(table.record(row))
            values = table.key_values(row[: len(table.order)])
            same = [column == value for column, value in zip(table.key, values, strict=True)]
            doom = {Build.status: machine.target("doom"), Build.lock_version: version_after_doom()}
            doomed = Build.update({**doom, **doomed_at()}).where(*same, Build.in_status(self.status)).execute()
            if doomed == 0:
                return BatchResult(failures=[Failure(record, error)])
            return BatchResult({"doomed": doomed}, rescued=[Failure(record, error)])
        return BatchResult()
