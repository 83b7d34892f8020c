"""The metrics and the status agree on which run is the last one that did its work."""

from __future__ import annotations

from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

import pytest

from tests.internals.core import WaitTimes, metrics
from tests.internals.engine import RunResult, record_run
from tests.internals.workers import status_sweep as sweep


@pytest.mark.parametrize(
    ("outcome", "reason", "moved"),
    [
        ("done", None, True),
        ("partial", "out_of_time", True),
        ("partial", "limit", True),
        ("partial", "shutdown", False),
        ("partial", "paused", False),
        ("partial", "gate", False),
        ("failed", "breaker", False),
        ("skipped", "disabled", False),
    ],
)
def test_last_success_is_the_last_run_that_reached_its_end_or_limits(
    monkeypatch: pytest.MonkeyPatch, outcome: Any, reason: str | None, moved: bool
) -> None:
    told: list[tuple[Any, ...]] = []
    monkeypatch.setattr(metrics, "LAST_SUCCESS", SimpleNamespace(set=lambda *what: told.append(what)))
    ended = RunResult(sweep.name, outcome, reason, 1, datetime.now(UTC), 1.0, {})

    record_run(sweep, ended, WaitTimes())

    assert bool(told) == moved
