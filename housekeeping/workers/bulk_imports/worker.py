"""Declaration of the cleanup of stale imports."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from datetime import timedelta
from typing import Final

from housekeeping.core import events
from housekeeping.sweeps import RowLog, Stage, Sweep, TableStage, Transition
from housekeeping.workers.bulk_imports.entity_stage import EVENT, TRACKERS_COUNTED_AS, EntityStage, TimeOut
from housekeeping.workers.bulk_imports.models import BulkImport, BulkImportEntity, BulkImportTracker

SCHEDULE: Final = "0 */4 * * *"  # document 65, 実行スケジュール
STALE_AFTER: Final = timedelta(hours=24)  # since the last change; document 65, 備考
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
    stale_after = sweep.stale_after or STALE_AFTER
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
            event=(events.import_timed_out, {"bulk_import_id": "id"}),
            row_log=IMPORT_LOG if log_records else None,
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
            batch_size=sweep.batch_size,
            event=(events.entity_timed_out, {"bulk_import_entity_id": "id", "bulk_import_id": "bulk_import_id"}),
            row_log=ENTITY_LOG if log_records else None,
        ),
    ]


sweep: Final = Sweep(
    name="bulk_imports.stale_import",
    stages=stages,
    counts=("timed_out_imports", "timed_out_entities", TRACKERS_COUNTED_AS, "failed", "out_of_time"),
    progress_counts=("timed_out_imports", "timed_out_entities"),
    schedule=SCHEDULE,
    batch_size=BATCH_SIZE,
    max_runtime=MAX_RUNTIME,
    stale_after=STALE_AFTER,
    options={"page_size": PAGE_SIZE, "log_records": True},
    # Rows that cannot be changed stay at the front. Enough of them would use up every run that starts there.
    resume_after_limit=True,
    feature_category="importers",
    data_consistency="sticky",
    confirm_first_run=False,
)

SWEEPS: Final = (sweep,)
