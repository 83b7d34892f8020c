"""Handlers of `refs_deleted` within the transaction that records the refs as deleted."""

from __future__ import annotations

import dataclasses
from typing import Any

from housekeeping.core import events
from housekeeping.sweeps.engine.runner import run_sweep
from housekeeping.workers.batched_git_ref_updates.worker import project_cleanup
from tests.integration.workers.batched_git_ref_updates.conftest import AddDeletions, Pending
from tests.integration.workers.batched_git_ref_updates.repositories import MakeRepository

SMALL = dataclasses.replace(project_cleanup, options={**project_cleanup.options, "page_size": 4, "max_deletes": 9})


def test_row_with_a_failing_handler_stays_pending(
    repository: MakeRepository, add_deletions: AddDeletions, pending: Pending
) -> None:
    bare = repository(*(f"refs/heads/{number}" for number in range(1, 11)))
    add_deletions(10)
    told: list[str] = []

    def handler(connection: Any, rows: list[dict[str, Any]], *, worker: str, run_id: int | None) -> None:
        if "refs/heads/2" in {row["ref"] for row in rows}:
            raise LookupError("no such branch")
        told.extend(row["ref"] for row in rows)

    events.on(events.refs_deleted, handler, within_transaction=True)
    try:
        result = run_sweep(SMALL, 1)
    finally:
        events.off(events.refs_deleted, handler)
    again = run_sweep(SMALL, 1)

    assert (result.outcome, result.reason) == ("partial", "limit")
    assert (result.counts["total_deletes"], result.counts["failed"]) == (8, 1)
    assert told == [f"refs/heads/{number}" for number in (1, 3, 4, 5, 6, 7, 8, 9)]
    assert (bare.refs(), again.counts["total_deletes"], pending()) == ([], 2, [])
