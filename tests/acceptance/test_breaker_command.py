"""Circuit breaker on the command line."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from tests.acceptance.conftest import Command
from tests.internals.ledger import NOW, Run

WORKER = "user_status_cleanup.batch"


@pytest.fixture
def history(made: None) -> None:
    """Record ten runs without rows."""
    for _ in range(10):
        Run.create(worker=WORKER, trigger="cli", started_at=NOW, heartbeat_at=NOW, finished_at=NOW, outcome="done")


STOP = json.dumps({WORKER: {"breaker": {"action": "stop"}}})


@pytest.mark.slow
def test_run_stopped_by_its_breaker_proceeds_with_confirm(
    history: None, add: Callable[[int], None], command: Command
) -> None:
    add(10_001)

    stopped = command("run", WORKER, "--json", WORKERS=STOP)
    confirmed = command("run", WORKER, "--json", "--confirm", WORKERS=STOP)

    result = json.loads(stopped.stdout)
    assert (stopped.returncode, result["outcome"], result["reason"]) == (1, "failed", "breaker")
    assert stopped.stderr.splitlines()[-1].startswith(f"housekeeping: {WORKER} failed: more than 10,000 rows are stale")
    assert f"housekeeping run {WORKER} --confirm" in stopped.stderr
    result = json.loads(confirmed.stdout)
    assert (confirmed.returncode, result["counts"]["confirmed"]) == (0, True)
    assert result["counts"]["deleted_rows"] > 0
