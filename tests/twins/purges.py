"""Faults of purges that are resumed (promise P1)."""

from __future__ import annotations

from typing import Any, Final

import pytest

from housekeeping.sweeps.ledger import run_queries, run_start
from tests.twins import Twin
from tests.twins.planting import instead

_PURGE: Final = "tests/integration/purge/test_purge.py::"


def _resumes_at_the_front(patch: pytest.MonkeyPatch) -> None:
    begin = run_start.begin

    def without_cursor(worker: str, **options: Any) -> Any:
        return begin(worker, **{**options, "resumes": None})

    patch.setattr(run_start, "begin", without_cursor)


TWINS: Final = (
    Twin(
        "P1",
        "resumes_a_purge_at_the_front",
        f"{_PURGE}test_resumed_purge_begins_behind_the_last_committed_batch",
        _resumes_at_the_front,
    ),
    Twin(
        "P1",
        "resumes_a_purge_twice",
        f"{_PURGE}test_of_two_processes_that_resume_a_purge_one_begins",
        instead(run_queries, "resumed_by", lambda run_id: None),
    ),
    Twin(
        "P1",
        "resumes_a_purge_that_can_still_commit",
        f"{_PURGE}test_dead_purge_cannot_commit_once_it_is_resumed",
        instead(run_start, "close_dead_runs", lambda *given: None),
    ),
)
