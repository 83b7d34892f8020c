"""Circuit breaker on the command line."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from housekeeping.sweeps.ledger.models import NOW, Run
from tests.acceptance.conftest import Command

WORKER = "user_status_cleanup.batch"


@pytest.fixture
def history(made: None) -> None:
    """Record ten runs without rows."""
    for _ in range(10):
        Run.create(worker=WORKER, trigger="cli", started_at=NOW, heartbeat_at=NOW, finished_at=NOW, outcome="done")


STOP = json.dumps({WORKER: {"breaker": {"action": "stop"}}})


@pytest.mark.slow
def test_breaker_only_warns_by_default_and_status_shows_the_alert(
    history: None, add: Callable[[int], None], command: Command
) -> None:
    add(10_001)

    ran = command("run", WORKER, "--json")
    shown = command("status")
    workers = {each["worker"]: each for each in json.loads(command("status", "--json").stdout)["workers"]}

    result = json.loads(ran.stdout)
    assert (ran.returncode, result["outcome"], result["reason"]) == (0, "done", None)
    assert (result["counts"]["deleted_rows"], result["counts"]["breaker"]["allowed"]) == (10_001, 10_000)
    (alarm,) = (each for each in workers[WORKER]["alarms"] if each["name"] == "breaker")
    assert (alarm["limit"], alarm["value"]) == (10_000, 10_001)
    assert f"ALERT {WORKER}: more than 10,000 rows are stale; the last 10 runs processed 0 at most" in shown.stdout


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
