"""Scheduler processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import redis

from housekeeping.workers.user_status_cleanup.models import UserStatus
from tests.acceptance.processes import PATIENCE_S, SCHEDULER, WORKER, eventually, started
from tests.acceptance.queues import Queues
from tests.internals.database import Database
from tests.internals.embedded import embedded
from tests.internals.ledger import Run, runs
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
                eventually(lambda: UserStatus.select().count() == 1, one, other, worker, patience_s=90)
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


def test_invalid_setting_raises_at_import(environment: dict[str, str]) -> None:
    environment["HOUSEKEEPING_CATCH_UP"] = "all"

    ended = subprocess.run(
        [sys.executable, "-c", f"from {APP} import broker"], env=environment, capture_output=True, text=True, timeout=60
    )

    assert "SettingsError: HOUSEKEEPING_CATCH_UP is 'all'" in ended.stderr
    assert ended.returncode == 1


@pytest.mark.slow
def test_scheduler_catches_up_after_an_outage(  # S4, S5
    environment: dict[str, str], postgres: Database, queues: Queues, tmp_path: Path
) -> None:
    environment["HOUSEKEEPING_WORKERS"] = OTHERS_OFF
    environment["HOUSEKEEPING_BUILT_IN"] = "all"  # also without their tables
    runs.record(
        STATUSES,
        "skipped",
        "paused",
        message_id=None,
        tick=datetime.now(UTC).replace(second=0, microsecond=0) - timedelta(minutes=10),
        trigger="schedule",
    )

    with started([*SCHEDULER, APP], environment, tmp_path / "scheduler") as scheduler:
        eventually(lambda: Run.select().count() > 1, scheduler, patience_s=40)

    missed = Run.select().order_by(Run.id.desc()).first()
    assert (missed.outcome, missed.reason) == ("missed", "no_scheduler")
    assert missed.counts["missed"] in (9, 10)  # the minute may turn while the scheduler starts
    assert len(queues.messages("cronjob")) == 1


#: periodiq's app, whose process is killed around the enqueue.
DYING = """
import os, signal
from housekeeping.app import broker
from housekeeping.core.settings import Settings
from housekeeping.middleware.enqueue import RedisQueues

owner, step = (broker, "put") if Settings.load().on_rabbitmq else (RedisQueues, "_execute")
enqueue = getattr(owner, step)

def die(*args):
    if {enqueued}:
        enqueue(*args)
    os.kill(os.getpid(), signal.SIGKILL)

setattr(owner, step, die)
"""


@pytest.mark.slow
def test_tick_of_a_scheduler_killed_before_sending_is_caught_up(  # S1, S5
    environment: dict[str, str], postgres: Database, redis_client: redis.Redis, queues: Queues, tmp_path: Path
) -> None:
    _kill_and_restart_a_scheduler(environment, postgres, redis_client, queues, tmp_path, enqueued=False)


@pytest.mark.slow
def test_tick_of_a_scheduler_killed_while_sending_runs_once(  # S1, S5
    environment: dict[str, str], postgres: Database, redis_client: redis.Redis, queues: Queues, tmp_path: Path
) -> None:
    _kill_and_restart_a_scheduler(environment, postgres, redis_client, queues, tmp_path, enqueued=True)


def _kill_and_restart_a_scheduler(
    environment: dict[str, str],
    postgres: Database,
    redis_client: redis.Redis,
    queues: Queues,
    tmp_path: Path,
    *,
    enqueued: bool,
) -> None:
    postgres.create_tables([UserStatus])
    (tmp_path / "dying.py").write_text(DYING.format(enqueued=enqueued))
    others: dict[str, dict[str, object]] = json.loads(OTHERS_OFF)
    environment["HOUSEKEEPING_WORKERS"] = json.dumps({**others, STATUSES: {"schedule": "0 0 1 1 *"}})
    new_year = datetime(datetime.now(UTC).year, 1, 1, tzinfo=UTC)
    two_years_before = new_year.replace(year=new_year.year - 2)
    runs.record(STATUSES, "skipped", "paused", message_id=None, tick=two_years_before, trigger="schedule")
    in_the_folder = os.pathsep.join(filter(None, [str(tmp_path), environment.get("PYTHONPATH", "")]))

    with started(
        [*SCHEDULER, "dying:broker"], environment | {"PYTHONPATH": in_the_folder}, tmp_path / "killed"
    ) as killed:
        assert killed.running.wait(PATIENCE_S) == -signal.SIGKILL
    claims = f"{environment['HOUSEKEEPING_NAMESPACE']}:tick_claim:*"
    eventually(lambda: not list(redis_client.scan_iter(match=claims)))
    with (
        started([*SCHEDULER, APP], environment, tmp_path / "scheduler") as scheduler,
        started([*WORKER, APP, "-p", "1", "-t", "1"], environment, tmp_path / "worker") as worker,
    ):
        eventually(lambda: Run.select().where(Run.outcome == "done").exists(), scheduler, worker)
        eventually(lambda: Run.select().where(Run.outcome == "missed").exists(), scheduler, worker)
        eventually(lambda: not queues.messages("cronjob"), worker)

    [missed] = Run.select().where(Run.outcome == "missed")
    [done] = Run.select().where(Run.outcome == "done")
    assert (missed.tick.year, missed.counts) == (new_year.year - 1, {"missed": 1})
    assert done.tick == new_year
    assert Run.select().count() == 3
