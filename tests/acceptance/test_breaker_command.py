from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from housekeeping.sweeps.own_tables import NOW, Run
from tests.acceptance.conftest import Command

WORKER = "user_status_cleanup.batch"


@pytest.fixture
def history(made: None) -> None:
    """Ten runs that had nothing to do."""
    for _ in range(10):
        Run.create(worker=WORKER, trigger="cli", started_at=NOW, heartbeat_at=NOW, finished_at=NOW, outcome="done")


@pytest.mark.slow
def test_a_run_that_its_breaker_stops_goes_on_with_the_id_of_a_plan(
    history: None, add: Callable[[int], None], command: Command
) -> None:
    add(10_001)

    stopped = command("run", WORKER, "--json")
    shown = command("plan", WORKER)
    plan_id = json.loads(command("plan", WORKER, "--json").stdout)["plan_id"]
    confirmed = command("run", WORKER, "--json", "--confirm", plan_id)

    result = json.loads(stopped.stdout)
    assert (stopped.returncode, result["outcome"], result["reason"]) == (1, "failed", "breaker")
    assert stopped.stderr.splitlines()[-1].startswith(
        f"housekeeping: {WORKER} failed: more than 10,000 records are stale"
    )
    assert f"housekeeping run {WORKER} --confirm " in shown.stdout
    result = json.loads(confirmed.stdout)
    assert (confirmed.returncode, result["counts"]["confirmed"]) == (0, True)
    assert result["counts"]["deleted_rows"] > 0


def test_a_wrong_plan_id_is_refused_in_one_line_before_anything_begins(history: None, command: Command) -> None:
    refused = command("run", WORKER, "--confirm", "abcdefghijklmnopqrstuvwx")

    assert (refused.returncode, refused.stdout, refused.stderr.count("\n")) == (2, "", 1)
    assert "is no plan id, or was mistyped; make one by: housekeeping plan" in refused.stderr
    assert Run.select().count() == 10
