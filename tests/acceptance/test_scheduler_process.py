"""Scheduler processes."""

from __future__ import annotations

import json
import subprocess
from datetime import timedelta
from pathlib import Path

import pytest

from housekeeping.workers.user_status_cleanup.models import UserStatus
from tests.acceptance.processes import SCHEDULER, WORKER, eventually, started
from tests.internals.database import Database
from tests.internals.embedded import embedded
from tests.internals.ledger import Run
from tests.internals.workers import BUILT_IN

APP = "housekeeping.app"
STATUSES = "user_status_cleanup.batch"
#: Only this worker has a schedule in these tests.
OTHERS_OFF = json.dumps(
    {sweep.name: {"enabled": False} for family in BUILT_IN for sweep in family.SWEEPS if sweep.name != STATUSES}
)


@pytest.mark.slow
def test_two_schedulers_started_without_redis_fire_the_next_tick_once(  # S1, S2, S3, S5
    environment: dict[str, str], postgres: Database, tmp_path: Path
) -> None:
    postgres.create_tables([UserStatus])
    postgres.execute_sql("INSERT INTO user_statuses (user_id, clear_status_at) VALUES (1, now()), (2, now() + '1 day')")
    environment["HOUSEKEEPING_WORKERS"] = OTHERS_OFF
    with embedded.start(postgres=False) as servers:
        environment["HOUSEKEEPING_REDIS_URL"] = servers.redis_url
        servers.stop("redis")
        with (
            started([*SCHEDULER, APP], environment, tmp_path / "one") as one,
            started([*SCHEDULER, APP], environment, tmp_path / "other") as other,
        ):
            eventually(lambda: one.said("Ticks could not be checked"), one)
            eventually(lambda: other.said("Ticks could not be checked"), other)
            servers.start("redis")
            with started([*WORKER, APP, "-p", "1", "-t", "2"], environment, tmp_path / "worker") as worker:
                # A minute until the tick, and a margin for a busy machine.
                eventually(lambda: UserStatus.select().count() == 1, one, other, worker, patience_s=180)
                eventually(lambda: Run.select().where(Run.outcome == "done").exists(), worker)

    # A slow start may miss a tick before Redis answers, and another one may have run since.
    rows = list(Run.select().order_by(Run.id))
    assert len({each.tick for each in rows}) == len(rows)
    run = next(each for each in rows if each.outcome != "missed")
    assert (run.outcome, run.trigger, run.counts["deleted_rows"]) == ("done", "schedule", 1)
    assert run.tick.second == 0
    assert run.started_at - run.tick < timedelta(minutes=1)


@pytest.mark.slow
@pytest.mark.parametrize("program", [SCHEDULER, [*WORKER, "-p", "2"]], ids=["periodiq", "dramatiq"])
def test_invalid_setting_ends_the_process_with_one_line(program: list[str], environment: dict[str, str]) -> None:
    environment["HOUSEKEEPING_CATCH_UP"] = "all"

    ended = subprocess.run([*program, APP], env=environment, capture_output=True, text=True, timeout=60)

    error_lines = [line for line in ended.stderr.splitlines() if "HOUSEKEEPING_" in line]
    assert len(error_lines) == 1
    assert error_lines[0].startswith("housekeeping: HOUSEKEEPING_CATCH_UP is 'all'; it should be")
    assert "Traceback" not in ended.stderr
    assert ended.returncode == 2
