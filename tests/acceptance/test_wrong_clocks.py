"""Commands on a machine whose clock differs by two days from the database's."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from psycopg2.extensions import connection as Connection

from housekeeping import Settings
from housekeeping.workers.user_status_cleanup.models import UserStatus
from tests.acceptance.conftest import Command
from tests.internals.ledger import Run

pytestmark = pytest.mark.slow

WORKER = "user_status_cleanup.batch"
DAY_S = 86_400
#: Runs the command line on a machine whose clock is this many seconds ahead.
Shifted = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def shifted(environment: dict[str, str], command: Command) -> Shifted:
    def run(ahead_s: float, *arguments: str) -> subprocess.CompletedProcess[str]:
        environment["PYTHONPATH"] = str(Path(__file__).with_name("shifted_clock"))
        environment["TEST_CLOCK_AHEAD_S"] = str(ahead_s)
        return command(*arguments)

    return run


@pytest.fixture
def statuses(add: Callable[[int], None], admin: Connection, settings: Settings) -> None:
    """Create three due statuses, and two that are due tomorrow."""
    add(3)
    with admin.cursor() as cursor:
        cursor.execute(
            f"INSERT INTO {settings.namespace}.user_statuses (user_id, clear_status_at) "
            "SELECT n, now() + interval '1 day' FROM generate_series(10, 11) AS n"
        )


@pytest.mark.parametrize("ahead_s", [2 * DAY_S, -2 * DAY_S])
def test_run_with_a_wrong_clock_exits_with_1_and_one_line(statuses: None, shifted: Shifted, ahead_s: int) -> None:
    finished = shifted(ahead_s, "run", WORKER)

    line = finished.stderr.splitlines()[-1]
    assert finished.returncode == 1
    assert line.startswith(f"housekeeping: {WORKER} failed: clocks differ, nothing was changed: this machine (")
    assert "check NTP on this machine and on the database's" in line and "Traceback" not in finished.stderr
    assert UserStatus.select().count() == 5
    assert [(run.outcome, run.reason) for run in Run.select()] == [("failed", "clock")]


def test_plan_status_and_doctor_work_and_show_the_clock_difference(statuses: None, shifted: Shifted) -> None:
    planned, status = (shifted(2 * DAY_S, *words, "--json") for words in (("plan", WORKER), ("status",)))
    shown = [shifted(2 * DAY_S, *words).stdout for words in (("plan", WORKER), ("status",))]
    doctor = json.loads(shifted(2 * DAY_S, "doctor", "--json").stdout)

    assert json.loads(planned.stdout)["backlog"] == 3
    [worker] = [each for each in json.loads(status.stdout)["workers"] if each["worker"] == WORKER]
    assert worker["backlog"] == 3
    for said in (planned, status):
        assert abs(json.loads(said.stdout)["clock_skew_s"] - 2 * DAY_S) < 5
    assert re.search(r"^clock +fails +this machine \(", shown[0], re.MULTILINE)
    assert "ALERT this machine (" in shown[1] and "(clock)" in shown[1]
    clocks = {(each["area"], each["level"]) for each in doctor["findings"] if each["subject"] == "clock"}
    assert clocks == {("postgres", "error"), ("redis", "warning")}


def test_pause_with_a_length_uses_the_databases_clock(statuses: None, shifted: Shifted) -> None:
    paused = shifted(-2 * DAY_S, "pause", WORKER, "--until", "2h")
    run = shifted(0, "run", WORKER, "--json")

    assert paused.returncode == 0
    assert json.loads(run.stdout)["reason"] == "paused"
