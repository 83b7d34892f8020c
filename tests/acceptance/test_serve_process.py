"""Processes of ``housekeeping serve``, which need only PostgreSQL."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final

import pytest

from housekeeping.workers.user_status_cleanup.models import UserStatus
from tests.acceptance.conftest import Command
from tests.acceptance.processes import PATIENCE_S, Process, eventually, started
from tests.internals.database import Database
from tests.internals.ledger import NOW, SILENCE, Run, TickRow, ticks

SERVE = [sys.executable, "-m", "housekeeping", "serve"]
STATUSES = "user_status_cleanup.batch"
CALLS = "shop.calls"
#: Its last tick is not in this minute, so that no other one comes during a test.
ONCE_A_YEAR: Final = "0 0 1 1 *"
#: A sweep whose run is in its first batch until the file ``go`` exists; the file ``called`` shows that it is. With the
#: file ``go_when_stopped``, the batch ends once the run is to stop.
MODULE = f"""
import pathlib, time
from datetime import timedelta
from housekeeping import Call, Delete, Lease, Limits, Rows, Sweep
from housekeeping.core.telemetry import current_message

def call(row):
    pathlib.Path("called").touch()
    message, until = current_message.get(), time.monotonic() + 60
    while not pathlib.Path("go").exists() and time.monotonic() < until:
        if pathlib.Path("go_when_stopped").exists() and message.stopping.is_set():
            return
        time.sleep(0.02)

calls = Sweep(
    "shop.calls",
    Rows("calls", stale=lambda row, now: row.due_at <= now, order="id", action=Call(call, then=Delete())),
    schedule="{ONCE_A_YEAR}", lease=Lease("calls", timedelta(minutes=10)), limits=Limits(batch=1),
)
"""
#: Sends SIGTERM to its own process while the line is written, before a supervisor could.
STOPPED_AT_ONCE = """
import os, signal, sys

class Stderr:
    def __init__(self, stream):
        self.stream = stream

    def __getattr__(self, name):
        return getattr(self.stream, name)

    def write(self, text):
        self.stream.write(text)
        if text.startswith("serving "):
            os.kill(os.getpid(), signal.SIGTERM)

sys.stderr = Stderr(sys.stderr)
"""


pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("without_redis")]


@pytest.fixture
def calls(
    environment: dict[str, str], postgres: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> dict[str, str]:
    """The environment of an application with the sweep, and three rows that are due."""
    postgres.execute_sql("CREATE TABLE calls (id bigint PRIMARY KEY, due_at timestamptz NOT NULL)")
    postgres.execute_sql("INSERT INTO calls SELECT n, now() FROM generate_series(1, 3) AS n")
    (tmp_path / "calls_of_the_shop.py").write_text(MODULE)
    catch_up(CALLS)
    monkeypatch.chdir(tmp_path)
    return environment | {"HOUSEKEEPING_SWEEPS": "calls_of_the_shop", "HOUSEKEEPING_BUILT_IN": "none"}


@contextmanager
def in_a_batch(calls: dict[str, str], folder: Path) -> Iterator[Process]:
    """Start a process; begin the block once its run is in the first batch."""
    with started(SERVE, calls, folder / "one") as process:
        eventually((folder / "called").exists, process)
        yield process


def catch_up(worker: str) -> None:
    """Let the first process of the test send this year's tick of the worker, which runs once a year."""
    ticks.remember(worker, datetime(datetime.now(UTC).year - 1, 1, 1, tzinfo=UTC))


def of(worker: str) -> list[Run]:
    return list(Run.select().where(Run.worker == worker).order_by(Run.id))


def test_two_processes_share_the_schedule_and_commands_show_it(
    environment: dict[str, str], add: Callable[[int], None], command: Command, tmp_path: Path
) -> None:
    # S1, S5, L4
    add(3)
    catch_up(STATUSES)
    environment["HOUSEKEEPING_WORKERS"] = json.dumps({STATUSES: {"schedule": ONCE_A_YEAR}})
    with (
        started(SERVE, environment, tmp_path / "one") as one,
        started(SERVE, environment, tmp_path / "other") as other,
    ):
        eventually(lambda: [run.outcome for run in of(STATUSES)][:1] == ["done"], one, other)
        eventually(lambda: _alive(command) == 4, one, other)  # each is a worker and a scheduler
        status = json.loads(command("status", "--json").stdout)
        why, doctor = command("why", STATUSES), command("doctor")
        # The library's own workers may be at work at this moment.
        eventually(lambda: "8 of 8 threads are free; runs need no queue" in command("plan", STATUSES).stdout, one)
        eventually(lambda: command("leases", "list").stdout == "no leases are held\n", one)
        assert [one.terminate(), other.terminate()] == [0, 0]

    [run] = of(STATUSES)
    assert (run.trigger, run.counts["deleted_rows"], UserStatus.select().count()) == ("schedule", 3, 0)
    names = {alert["name"] for alert in status["alerts"]}
    assert names.isdisjoint({"unavailable", "no_worker", "no_scheduler", "overdue"}), status["alerts"]
    assert why.stdout.splitlines()[1] == "it completed" and why.stdout.splitlines()[-1] == "a run now would start"
    assert "leases, ticks and heartbeats are in the database" in " ".join(doctor.stdout.split())
    assert doctor.returncode == 0, doctor.stdout
    assert _alive(command) == 0, "the last heartbeats"


def _alive(command: Command) -> int:
    processes = json.loads(command("status", "--json").stdout)["processes"]
    return sum(each["alive"] for each in processes)


def test_stopped_process_ends_its_batch_and_the_next_one_continues_the_tick(
    calls: dict[str, str], postgres: Database, tmp_path: Path
) -> None:
    # R5, S5
    with in_a_batch(calls, tmp_path) as one:
        (tmp_path / "go_when_stopped").touch()
        assert one.terminate() == 0
    (tmp_path / "go").touch()
    [stopped] = of(CALLS)
    assert (stopped.outcome, stopped.reason) == ("partial", "shutdown")
    assert TickRow.select().where(TickRow.due_at.is_null(False), TickRow.holder.is_null()).count() >= 1

    with started(SERVE, calls, tmp_path / "other") as other:
        eventually(lambda: of(CALLS)[-1].outcome == "done", other)
        assert other.terminate() == 0

    of_tick = [run.outcome for run in of(CALLS) if run.tick == stopped.tick]
    assert of_tick == ["partial", "done"]
    assert postgres.execute_sql("SELECT count(*) FROM calls").fetchone() == (0,)


def test_process_that_is_stopped_as_soon_as_it_serves_exits_with_0(calls: dict[str, str], tmp_path: Path) -> None:
    # R5
    with (tmp_path / "calls_of_the_shop.py").open("a") as module:
        module.write(STOPPED_AT_ONCE)

    with started(SERVE, calls, tmp_path / "one") as one:
        assert one.running.wait(PATIENCE_S) == 0

    assert one.text().splitlines() == [
        "serving 3 workers (Ctrl-C to stop)",
        "housekeeping: each run ends after its batch; a second Ctrl-C or SIGTERM ends this process at once",
    ]


def test_second_signal_ends_the_process_within_its_batch(
    calls: dict[str, str], postgres: Database, tmp_path: Path
) -> None:
    # R5
    with in_a_batch(calls, tmp_path) as one:
        one.running.terminate()
        eventually(lambda: "a second Ctrl-C" in one.text(), one)
        assert one.terminate() == 143

    assert one.text().splitlines()[-1] == "housekeeping: ended at once; other processes resume its runs after a minute"
    assert [run.outcome for run in of(CALLS)] == [None]
    assert postgres.execute_sql("SELECT count(*) FROM calls").fetchone() == (3,)


def test_installations_with_different_schemas_share_a_database(
    environment: dict[str, str], add: Callable[[int], None], postgres: Database, command: Command, tmp_path: Path
) -> None:
    # Each has its own ticks, leases and heartbeats.
    add(3)
    other = {"SCHEMA": "other", "NAMESPACE": environment["HOUSEKEEPING_NAMESPACE"] + "_2"}
    assert command("init", **other).returncode == 0
    assert command("pause", STATUSES, **other).returncode == 0
    paused = environment | {f"HOUSEKEEPING_{name}": value for name, value in other.items()}

    with started(SERVE, environment, tmp_path / "one") as one, started(SERVE, paused, tmp_path / "two") as two:
        eventually(lambda: [run.outcome for run in of(STATUSES)][:1] == ["done"], one)
        eventually(lambda: STATUSES in dict(_runs_of_other(postgres)), two)
        alive = [json.loads(command("status", "--json", **each).stdout)["processes"] for each in ({}, other)]

    assert dict(_runs_of_other(postgres))[STATUSES] == "skipped"
    assert "skipped" not in {run.outcome for run in of(STATUSES)}
    assert [len(each) for each in alive] == [2, 2]
    postgres.execute_sql("DROP SCHEMA other CASCADE")


def _runs_of_other(postgres: Database) -> list[tuple[str, str]]:
    return list(postgres.execute_sql("SELECT worker, outcome FROM other.runs ORDER BY id").fetchall())


def test_another_process_takes_over_from_a_killed_one(
    calls: dict[str, str], postgres: Database, tmp_path: Path
) -> None:
    # S5, L1
    with in_a_batch(calls, tmp_path) as one:
        one.kill()
    # The time passes after which the process and its run count as dead.
    TickRow.update(due_at=NOW).where(TickRow.holder.is_null(False)).execute()
    Run.update(heartbeat_at=NOW - SILENCE - timedelta(seconds=1)).execute()
    (tmp_path / "go").touch()

    with started(SERVE, calls, tmp_path / "other") as other:
        eventually(lambda: of(CALLS)[-1].outcome == "done", other)

    killed, *_ = of(CALLS)
    assert [run.outcome for run in of(CALLS) if run.tick == killed.tick][0] == "lost"
    assert {run.outcome for run in of(CALLS)} <= {"lost", "done", "skipped"}
    assert postgres.execute_sql("SELECT count(*) FROM calls").fetchone() == (0,)


def test_paused_worker_is_skipped(calls: dict[str, str], command: Command, tmp_path: Path) -> None:
    given = {name.removeprefix("HOUSEKEEPING_"): value for name, value in calls.items() if "HOUSEKEEPING_" in name}
    assert command("pause", CALLS, **given).returncode == 0

    with started(SERVE, calls, tmp_path / "one") as one:
        eventually(lambda: of(CALLS), one)

    assert (of(CALLS)[0].outcome, of(CALLS)[0].reason) == ("skipped", "paused")


def test_features_that_need_messages_fail_in_one_line(command: Command) -> None:
    sent = command("enqueue", STATUSES)
    assert (sent.returncode, sent.stderr.count("\n")) == (2, 1)
    assert "HOUSEKEEPING_REDIS_URL is not set" in sent.stderr

    listed = json.loads(command("list", "--json", BUILT_IN="all").stdout)
    skipped = command("run", "ci.stuck_jobs", "--json")
    assert "it sends messages, and HOUSEKEEPING_REDIS_URL is not set" in json.dumps(listed)
    assert (json.loads(skipped.stdout)["outcome"], json.loads(skipped.stdout)["reason"]) == ("skipped", "not_set_up")


def test_serve_refuses_an_installation_with_redis(command: Command) -> None:
    refused = command("serve", REDIS_URL="redis://localhost:1/0")

    assert refused.returncode == 2
    assert refused.stderr.startswith("housekeeping: housekeeping serve works without Redis, but")
