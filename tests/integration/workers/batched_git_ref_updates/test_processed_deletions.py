"""The sweep that removes processed deletions."""

from __future__ import annotations

import pytest
from psycopg2.extensions import connection as Connection

from housekeeping import Settings
from housekeeping.workers.batched_git_ref_updates.models import Deletion
from tests.integration.workers.batched_git_ref_updates.conftest import AddDeletions
from tests.internals.core import WorkerSettings
from tests.internals.doctor import needed_rights
from tests.internals.engine import run_sweep
from tests.internals.workers import configured_sweeps, processed_deletions

TABLE = "batched_git_ref_updates_deletions"


def test_it_runs_daily_and_is_off_by_default(deletions: type[Deletion]) -> None:
    sweep = configured_sweeps(Settings.load())[processed_deletions.name]

    assert (sweep.schedule, sweep.enabled) == ("50 2 * * *", False)
    assert run_sweep(sweep).reason == "disabled"


def test_only_rows_processed_over_a_week_ago_are_removed(add_deletions: AddDeletions, admin: Connection) -> None:
    add_deletions(4)
    with admin.cursor() as cursor:
        cursor.execute(f"UPDATE {TABLE} SET status = 2, updated_at = now() WHERE id <= 3")
        cursor.execute(f"UPDATE {TABLE} SET updated_at = now() - interval '7 days 1 minute' WHERE id IN (1, 4)")
        cursor.execute(f"UPDATE {TABLE} SET updated_at = now() - interval '7 days' + interval '1 minute' WHERE id = 2")

    result, again = run_sweep(processed_deletions, force=True), run_sweep(processed_deletions, force=True)

    assert (result.counts["deleted_rows"], again.counts["deleted_rows"]) == (1, 0)
    assert [row.id for row in Deletion.select().order_by(Deletion.id)] == [2, 3, 4]


@pytest.mark.parametrize("enabled", [False, True])
def test_right_to_delete_is_needed_only_where_it_is_enabled(settings: Settings, enabled: bool) -> None:
    workers = {processed_deletions.name: WorkerSettings(enabled=enabled)}

    needed = needed_rights(settings.model_copy(update={"workers": workers}))

    assert ("DELETE" in needed[TABLE]) == enabled
