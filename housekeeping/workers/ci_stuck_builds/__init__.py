"""Fails CI builds that are stuck in a status: canceling, running, scheduled or pending.

============  =====================================================================
Source        Batch design document 6, ``Ci::StuckBuilds::DropCancelingWorker``
Runs          ``ci.stuck_jobs`` every hour; its children at once, 15, 30 and 45 minutes later
Touches       ``ci_builds`` (update)
Limits        100 rows per statement, 25 min per run; stale after an hour, pending builds after a day
Concurrency   One run of each worker, by a lease of 30 minutes
On failure    Retried up to 25 times, and the next hour's run does the same work
============  =====================================================================

A child's stage drops the stuck builds of one status in batches, and dooms the builds that cannot be dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any, Final

from peewee import CTE, Expression, Select, Tuple, fn

from housekeeping import (
    Alerts,
    Announcement,
    Batch,
    BatchResult,
    Event,
    Failure,
    Guard,
    Lease,
    Limits,
    Position,
    RowLog,
    Send,
    Sweep,
    TableStage,
    Throttle,
    Write,
    current_database,
    error_line,
    events,
    key_of,
    update_rows,
)
from housekeeping import logger as named_logger
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
    stale_after = timedelta(seconds=sweep.options["stale_after_s"])
    key = key_of(Build)
    # If the primary key has more columns than the id, log all of them.
    key_names = tuple(column.name for column in key if column is not Build.id)
    row_log = RowLog(
        event="Dropping outdated build",
        fields={**{name: name for name in ("build_id", "runner_id", *key_names)}, "failure_reason": "reason_label"},
        constants={"status": status.value},
    )
    return BuildsStage(
        name=status.value,
        stale=lambda now: Build.in_status(status) & outdated(now - stale_after),
        order=(Build.created_at, Build.project_id, *key),  # document 6, 備考
        action=Drop(status, reason),
        batch_size=sweep.limits.batch,
        columns={
            "runner_id": Build.runner_id,
            "build_name": Build.name,
            "build_stage": Build.stage,
            "pipeline_id": Build.commit_id,
            "lock_version": Build.lock_version,
        },
        event=Event(events.build_dropped, "build_id", "project_id", "pipeline_id", "failure_reason", *key_names),
        row_log=row_log if sweep.options["log_records"] else None,
        counts=("dropped", "doomed", "failed", "out_of_time"),
        progress_counts=("dropped", "doomed"),
        start_message=f"Cleaning {status.value}, timed-out builds",
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
        return self.failed(super().record(row), self.reason)

    @staticmethod
    def failed(record: dict[str, Any], reason: FailureReason) -> dict[str, Any]:
        """Return the record of a build that failed for this reason."""
        return {**record, "build_id": record["id"], "failure_reason": reason, "reason_label": reason.label}

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
        dropped = [row for row in result.rows if row["failure_reason"] != reason]
        return [*super().announcements(replace(result, rows=dropped)), Announcement(events.build_doomed, doomed)]


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
        found: Any = table.locking(batch, table.rows(batch)).tuples()
        for row in found.execute(current_database):
            whole = table.record(row)
            record = table.about(whole)
            values = table.key_values(row[: len(table.order)])
            same = [column == value for column, value in zip(table.key, values, strict=True)]
            doom = {Build.status: machine.target("doom"), Build.lock_version: version_after_doom()}
            doomed = update_rows(Build.update({**doom, **doomed_at()}).where(*same, Build.in_status(self.status)))
            if doomed == 0:
                return BatchResult(failures=[Failure(record, error)])
            # Its drop was tried, so it has the line of a drop as well (document 6, ログ出力).
            rows = [table.failed(whole, FailureReason.DATA_INTEGRITY_FAILURE)]
            return BatchResult({"doomed": doomed}, rows=rows, rescued=[Failure(record, error)])
        return BatchResult()


SCHEDULE: Final = "0 * * * *"  # document 6, 実行スケジュール
BATCH_SIZE: Final = 100  # rows a statement; document 6, テーブル別操作詳細
STALE_AFTER: Final = timedelta(hours=1)  # document 6, 備考
PENDING_FOR: Final = timedelta(days=1)  # docs/workers/ci_stuck_builds.md
LEASE_TTL: Final = timedelta(minutes=30)  # document 6, 排他制御
MAX_RUNTIME: Final = timedelta(minutes=25)  # well before the lease ends
LONGEST_RUN: Final = timedelta(minutes=30)  # document 6, 監視・アラート
MOST_DROPPED: Final = 1000  # builds per run, ten full batches; document 6, 監視・アラート gives no number
LATE: Final = timedelta(days=1)  # 24 runs; no document has a number
MOST_DOOMED: Final = 10  # builds per run; each is damaged data that a person has to look into

#: Child -> delay after the parent; document 6, 前後の処理との関連.
DELAYS: Final = {
    "ci.stuck_builds.drop_pending": timedelta(0),
    "ci.stuck_builds.drop_running": timedelta(minutes=15),
    "ci.stuck_builds.drop_scheduled": timedelta(minutes=30),
    "ci.stuck_builds.drop_canceling": timedelta(minutes=45),
}

#: Tables of these workers, by their names in the documents.
MODELS: Final = {"ci_builds": Build}

#: Rights that these workers need on their tables.
RIGHTS: Final = {
    "ci_builds": ("SELECT", "UPDATE (status, failure_reason, finished_at, updated_at, lock_version)"),
}


def drop_sweep(
    status: BuildStatus,
    outdated: Callable[[datetime], Expression],
    reason: FailureReason = FailureReason.STUCK_OR_TIMEOUT_FAILURE,
    stale_after: timedelta = STALE_AFTER,
) -> Sweep:
    """Return a sweep that drops the outdated builds of a status; the parent sends it every hour.

    Parameters:
      outdated: The predicate for such builds, given the time before which a build is outdated.
    """
    return Sweep(
        f"ci.stuck_builds.drop_{status.value}",
        lambda sweep: stuck_builds(sweep, status, outdated, reason),
        lease=Lease(f"ci/stuck_builds/drop_{status.value}", LEASE_TTL),
        limits=Limits(
            BATCH_SIZE,
            MAX_RUNTIME,
            # Builds that can neither be dropped nor doomed must not use up the time of every run.
            resume="after_limit",
            batch_takes=None,
        ),
        guard=Guard(first_run=False),
        alerts=Alerts(longest_run=LONGEST_RUN, most={"dropped": MOST_DROPPED, "doomed": MOST_DOOMED}, late=LATE),
        options={"stale_after_s": stale_after.total_seconds(), "log_records": True},
        actor={
            "feature_category": "continuous_integration",
            "data_consistency": "always",
            # The parent sends each child again every hour, so a retry is delayed by minutes at most.
            "rediscovered": True,
            # At most one message of a child is live: delayed, queued, running or waiting for a retry. A child that is
            # still running when its parent runs again is run once more right after, so that no hour is without its run.
            "deduplicate": "until_executed",
            "deduplication": {"including_scheduled": True, "if_deduplicated": "reschedule_once"},
        },
    )


drop_pending: Final = drop_sweep(
    BuildStatus.PENDING,
    lambda limit: (Build.created_at < limit) & (Build.updated_at < limit),
    stale_after=PENDING_FOR,
)

drop_running: Final = drop_sweep(BuildStatus.RUNNING, lambda limit: Build.updated_at < limit)

drop_scheduled: Final = drop_sweep(
    BuildStatus.SCHEDULED, lambda limit: Build.scheduled_at < limit, FailureReason.STALE_SCHEDULE
)

drop_canceling: Final = drop_sweep(
    BuildStatus.CANCELING,
    # Both times: a build that was canceled long after its creation is not stuck; document 6, 備考
    lambda limit: (Build.created_at < limit) & (Build.updated_at < limit),
)

stuck_jobs: Final = Sweep(
    "ci.stuck_jobs",
    Send(DELAYS),
    schedule=SCHEDULE,
    # It changes no row: nothing is to hold up the children.
    limits=Limits(throttle=Throttle(replication_lag_s=None, waiting_locks=None)),
    guard=Guard(times_history=None, first_run=False),
    actor={"feature_category": "continuous_integration", "data_consistency": "always"},
)

# The parent last: sent in this order, no child is a duplicate of a message that the parent has enqueued.
SWEEPS: Final = (drop_pending, drop_running, drop_scheduled, drop_canceling, stuck_jobs)
