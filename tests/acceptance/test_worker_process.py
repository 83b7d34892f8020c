"""Worker processes that are killed or stopped."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import redis
from dramatiq import Message

from housekeeping.workers.user_status_cleanup.models import UserStatus
from tests.acceptance.processes import HANGS_ONCE, WORKER, eventually, started
from tests.acceptance.queues import Queues
from tests.internals.database import Database
from tests.internals.ledger import Run

STATUS_CLEANUP = "user_status_cleanup.batch"


class Trial:
    """Processes of an application whose actor hangs once, observed from outside."""

    def __init__(self, folder: Path, environment: dict[str, str], client: redis.Redis, queues: Queues) -> None:
        (folder / "trial.py").write_text(HANGS_ONCE)
        self.command = [*WORKER, "trial", "-p", "1", "-t", "2", "--path", str(folder)]
        self.environment = environment
        self._client = client
        self._queues = queues

    def send(self, name: str) -> None:
        self._queues.put("default", "hang_once", name)

    def runs(self, name: str) -> int:
        return int(self._client.llen(f"{self.environment['HOUSEKEEPING_NAMESPACE']}:began:{name}"))

    def messages(self) -> list[Message[Any]]:
        return self._queues.messages("default")


@pytest.fixture
def trial(tmp_path: Path, environment: dict[str, str], redis_client: redis.Redis, queues: Queues) -> Trial:
    environment["HOUSEKEEPING_GRACE_S"] = "1"
    return Trial(tmp_path, environment, redis_client, queues)


@pytest.mark.slow
def test_messages_of_a_killed_worker_run_again_soon(trial: Trial, tmp_path: Path) -> None:  # B1
    for name in ("one", "other"):
        trial.send(name)
    with started(trial.command, trial.environment, tmp_path / "first") as first:
        eventually(lambda: trial.runs("one") and trial.runs("other"), first)
        first.kill()

    with started(trial.command, trial.environment, tmp_path / "second") as second:
        eventually(lambda: (trial.runs("one"), trial.runs("other")) == (2, 2), second)


@pytest.mark.slow
def test_each_of_several_named_queues_is_consumed(
    environment: dict[str, str], made: None, queues: Queues, tmp_path: Path
) -> None:
    queues.put("cronjob", STATUS_CLEANUP)
    command = [sys.executable, "-m", "housekeeping", "worker", "-t", "1", "-Q", "cronjob", "-Q", "git_refs"]

    with started(command, environment, tmp_path / "log") as worker:
        eventually(lambda: Run.select().where(Run.outcome == "done").exists(), worker)


@pytest.mark.slow
def test_stopped_sweep_resumes_from_its_cursor(  # R5
    environment: dict[str, str], postgres: Database, queues: Queues, tmp_path: Path
) -> None:
    postgres.create_tables([UserStatus])
    postgres.execute_sql(
        "INSERT INTO user_statuses (user_id, clear_status_at) "
        "SELECT n, now() - n * interval '1 minute' FROM generate_series(1, 300) AS n"
    )
    # Slow enough to be interrupted: 10 ms a row, one row a batch.
    postgres.execute_sql(
        "CREATE FUNCTION be_slow() RETURNS trigger LANGUAGE plpgsql AS "
        "$$ BEGIN PERFORM pg_sleep(0.01); RETURN OLD; END $$"
    )
    postgres.execute_sql("CREATE TRIGGER slow BEFORE DELETE ON user_statuses FOR EACH ROW EXECUTE FUNCTION be_slow()")
    environment["HOUSEKEEPING_WORKERS"] = json.dumps({STATUS_CLEANUP: {"batch_size": 1}})
    queues.put("cronjob", STATUS_CLEANUP)
    command = [*WORKER, "housekeeping.app", "-p", "1", "-t", "1"]

    with started(command, environment, tmp_path / "first") as first:
        eventually(lambda: UserStatus.select().count() < 300, first)
        assert first.terminate() == 0
    left = UserStatus.select().count()
    [stopped] = Run.select()
    [waiting] = queues.messages("cronjob")
    postgres.execute_sql("DROP TRIGGER slow ON user_statuses")
    with started(command, environment, tmp_path / "second") as second:
        eventually(lambda: Run.select().where(Run.outcome == "done").exists(), second)
        assert second.terminate() == 0

    assert (stopped.outcome, stopped.reason, stopped.counts["deleted_rows"]) == ("partial", "shutdown", 300 - left)
    assert queues.messages("cronjob") == []
    assert "retries" not in waiting.options
    ended = Run.select().order_by(Run.id.desc()).first()
    assert (ended.message_id, ended.counts["deleted_rows"]) == (stopped.message_id, left)
    assert any(line.get("resumed") is True for line in second.lines())
