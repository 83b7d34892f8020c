"""Dry runs and plans."""

from __future__ import annotations

import json
from typing import Final

import pytest

from housekeeping import Settings
from tests.installation import WORKERS, Installation
from tests.installation import installation as installation
from tests.installation import redis_of_installations as redis_of_installations
from tests.internals.workers import configured_sweeps

pytestmark = pytest.mark.slow


#: The outbox delivers to handlers, and the command line's process has imported none. No example of a deleted ref is old
#: enough for its row to be removed. `ci.stuck_jobs` sends messages and has no rows; test_stuck_jobs.py plans it.
IDLE: Final = ("housekeeping.outbox", "batched_git_ref_updates.processed_deletions", "ci.stuck_jobs")


@pytest.mark.parametrize("name", [name for name in WORKERS if name not in IDLE])
def test_dry_run_writes_nothing_and_counts_the_runs_changes(installation: Installation, name: str) -> None:
    # Some rows end differently: a damaged build fails, which only the attempt shows.
    progress_counts = configured_sweeps(Settings())[name].progress_counts
    call = [name, *filter(None, [WORKERS[name]])]
    before = installation.everything()

    planned = installation.command("plan", *call, "--json")
    dry = installation.command("run", *call, "--dry-run", "--json")
    after = installation.everything()
    run = installation.command("run", *call, "--json")

    assert after == before
    assert installation.everything() != before
    counts = [json.loads(ended.stdout)["counts"] for ended in (dry, run)]
    assert json.loads(planned.stdout)["backlog"] > 0
    assert sum(counts[0][each] for each in progress_counts) == sum(counts[1][each] for each in progress_counts) > 0


def test_plan_before_init_writes_nothing(installation: Installation) -> None:
    name = "user_status_cleanup.batch"
    with installation.admin.cursor() as cursor:
        cursor.execute(f"DROP SCHEMA {installation.settings.schema_name} CASCADE")
    before = installation.everything()

    planned = installation.command("plan", name, "--json")
    dry = installation.command("run", name, "--dry-run", "--json")

    assert installation.everything() == before
    assert json.loads(planned.stdout)["backlog"] == json.loads(dry.stdout)["counts"]["deleted_rows"] == 7
