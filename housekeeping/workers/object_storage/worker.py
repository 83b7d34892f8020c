"""Declaration of the deletion of stale direct uploads."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any, Final

from housekeeping.sweeps import AlertThresholds, Finding, ObjectStoreUnavailable, Sweep
from housekeeping.workers.object_storage import stores
from housekeeping.workers.object_storage.upload_stage import PendingUploadsStage

__all__ = ["MODELS", "RIGHTS", "SWEEPS", "configure", "examine", "sweep", "unconfigured"]

#: This worker uses no table of the application: pending uploads live in Redis.
MODELS: Final[dict[str, Any]] = {}
RIGHTS: Final[dict[str, tuple[str, ...]]] = {}

SCHEDULE: Final = "*/6 * * * *"  # document 100, 実行スケジュール
MAX_EXEC_DURATION: Final = timedelta(seconds=250)  # document 100, 備考
STALE_AFTER: Final = timedelta(hours=3)  # docs/workers/object_storage.md; document 100, 備考: "a certain time"
PAGE: Final = 1000  # entries per page; as many objects as S3 deletes per request
LONGEST_RUN: Final = timedelta(seconds=250)  # document 100, 監視・アラート
FAILED_RUNS: Final = 3  # in a row; document 100, 監視・アラート: 連続失敗, without a number
LARGEST_BACKLOG: Final = 10_000  # stale entries left by a run; document 100, 監視・アラート: 大量蓄積, without a number

configure = stores.configure

sweep: Final = Sweep(
    name="object_storage.delete_stale_direct_uploads",
    stages=lambda sweep: [
        PendingUploadsStage(
            sweep.batch_size,
            sweep.stale_after or STALE_AFTER,
            sweep.max_runtime,
            log_records=sweep.options["log_records"],
        )
    ],
    counts=("total_pending_entries", "total_deleted_stale_entries", "execution_timeout", "failed"),
    progress_counts=("total_deleted_stale_entries",),
    schedule=SCHEDULE,
    batch_size=PAGE,
    max_runtime=MAX_EXEC_DURATION,
    stale_after=STALE_AFTER,
    options={"log_records": False},
    # Document 100, エラー処理: after a time-out the next run continues. If it started at the
    # front, slow failures there would keep the rest waiting for ever.
    resume_after_limit=True,
    alerts=AlertThresholds(longest_run=LONGEST_RUN, backlog=LARGEST_BACKLOG, failed_runs=FAILED_RUNS),
    feature_category="job_artifacts",
    data_consistency="sticky",
    actor_options={"deduplicate": "until_executed"},
    confirm_first_run=False,
)

SWEEPS: Final = (sweep,)


def unconfigured() -> str | None:
    """Return the missing setting, or None when a store is configured."""
    return None if stores.configured else "HOUSEKEEPING_OBJECT_STORES is not set"


def examine() -> Iterator[Finding]:
    """Check that each enabled object store can be reached and listed, for `housekeeping doctor`."""
    if not stores.configured:
        yield Finding(
            "warning", sweep.name, "object stores", "none is set: every entry is refused", "HOUSEKEEPING_OBJECT_STORES"
        )
    for location, store in stores.configured.items():
        if not store.enabled:
            yield Finding("fine", sweep.name, f"object store {location}", "is switched off")
            continue
        try:
            store.check_access()
            yield Finding("fine", sweep.name, f"object store {location}", "can be listed")
        except ObjectStoreUnavailable as error:
            yield Finding(
                "error", sweep.name, f"object store {location}", str(error), "or switch it off: enabled false"
            )
