"""Metrics that Prometheus reads from real processes."""

from __future__ import annotations

import json
import socket
import stat
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import redis

from housekeeping import ExclusiveLease
from tests.acceptance.processes import eventually, started
from tests.acceptance.queues import Queues
from tests.integration.metrics.pages import (
    STATUSES,
    due_statuses,
    free_port,
    metered,
    read,
    shows,
)
from tests.internals.database import Database
from tests.internals.ledger import runs
from tests.internals.workers import BUILT_IN

#: Starts many processes.
pytestmark = pytest.mark.slow

HOUSEKEEPING = [sys.executable, "-m", "housekeeping"]


def test_metrics_page_sums_all_worker_processes(  # the counters, over two processes
    environment: dict[str, str], queues: Queues, redis_client: redis.Redis, tmp_path: Path, postgres: Database
) -> None:
    held = ExclusiveLease("taken", timedelta(minutes=5), redis_client)
    assert held.try_obtain()
    with metered(environment, tmp_path) as (process, port):
        queues.put("metered", "meet", times=2)
        for name in ("ask", "fail", "lose", "meet_a_held_lease"):
            queues.put("metered", name)
        eventually(shows(port, "housekeeping_runs_total", 2, worker="meet", outcome="done"), process)
        eventually(shows(port, "housekeeping_runs_total", 2, worker="work", outcome="done"), process)
        eventually(shows(port, "housekeeping_dead_letters_total", 1, worker="fail"), process)
        eventually(shows(port, "housekeeping_leases_lost_total", 1, worker="lose"), process)
        eventually(shows(port, "housekeeping_runs_total", 1, worker="meet_a_held_lease", outcome="skipped"), process)
        page = read(port)
        assert process.terminate() == 0

    assert page.value("housekeeping_deduplicated_total", worker="work") == 2
    assert page.value("housekeeping_runs_total", worker="fail", outcome="failed") == 2
    assert page.value("housekeeping_run_duration_seconds_count", worker="fail") == 2
    assert page.value("housekeeping_retries_total", worker="fail") == 1
    assert page.value("housekeeping_leases_requested_total", worker="lose") == 1
    assert page.value("housekeeping_leases_held_total", worker="lose") == 0
    assert page.value("housekeeping_leases_held_total", worker="meet_a_held_lease") == 1
    assert page.value("housekeeping_run_duration_seconds_count", worker="meet_a_held_lease") is None
    assert page.value("dramatiq_messages_total", actor_name="ask", queue_name="metered") == 1


def test_metrics_page_shows_counts_and_backlog_of_a_run(
    environment: dict[str, str], queues: Queues, tmp_path: Path, postgres: Database
) -> None:
    due_statuses(postgres, 250)
    alarms = {"longest_run_s": 90, "backlog": 120}
    environment["HOUSEKEEPING_WORKERS"] = json.dumps(
        {STATUSES: {"batch_size": 100, "max_runtime_s": 0.000001, "alarms": alarms}}
    )
    began = datetime.now(UTC).timestamp()
    with metered(environment, tmp_path) as (process, port):
        first = read(port)
        queues.put("cronjob", STATUSES)
        eventually(shows(port, "housekeeping_backlog_rows", 121, worker=STATUSES), process)
        eventually(shows(port, "housekeeping_alarm", 1, worker=STATUSES, alarm="backlog"), process)
        page = read(port)
        assert process.terminate() == 0

    assert first.value("housekeeping_runs_total", worker=STATUSES, outcome="partial") == 0
    assert first.value("housekeeping_rows_total", worker=STATUSES, result="deleted_rows") == 0
    assert first.value("housekeeping_alarm_limit", worker=STATUSES, alarm="longest_run") == 90
    assert first.value("housekeeping_alarm_limit", worker=STATUSES, alarm="backlog") == 120
    assert first.value("housekeeping_alarm_limit", worker=STATUSES, alarm="overdue") == 180
    assert page.value("housekeeping_runs_total", worker=STATUSES, outcome="partial") == 1
    assert page.value("housekeeping_rows_total", worker=STATUSES, result="deleted_rows") == 100
    assert page.value("housekeeping_last_run_rows", worker=STATUSES, result="deleted_rows") == 100
    assert page.value("housekeeping_run_duration_seconds_count", worker=STATUSES) == 1
    assert page.value("housekeeping_alarm", worker=STATUSES, alarm="longest_run") == 0
    oldest, ended = (
        page.value(f"housekeeping_{name}_seconds", worker=STATUSES) or 0
        for name in ("oldest_stale_age", "last_success_timestamp")
    )
    assert 150 * 60 <= oldest < 150 * 60 + 60  # the first 100 were the oldest
    assert began <= ended <= datetime.now(UTC).timestamp()
    assert (page.value("housekeeping_database_seconds_total", worker=STATUSES) or 0) > 0
    assert (page.value("housekeeping_redis_seconds_total", worker=STATUSES) or 0) == 0  # it has no lease


def test_worker_serves_its_metrics_from_a_temporary_directory(
    environment: dict[str, str], queues: Queues, tmp_path: Path, postgres: Database
) -> None:
    due_statuses(postgres, 7)
    port, folder = free_port(), tmp_path / "temporary"
    folder.mkdir()
    own = {"HOUSEKEEPING_METRICS_PORT": str(port), "TMPDIR": str(folder)}
    arguments = [*HOUSEKEEPING, "worker", "--processes", "2", "--threads", "1"]

    with started(arguments, environment | own, tmp_path / "worker") as worker:
        eventually(lambda: worker.said("Metrics are served"), worker)
        queues.put("cronjob", STATUSES)
        eventually(shows(port, "housekeeping_rows_total", 7, worker=STATUSES, result="deleted_rows"), worker)
        [shared] = folder.glob("housekeeping-metrics-*")
        mode = stat.S_IMODE(shared.stat().st_mode)
        elsewhere = _listens(_address_of_this_machine(), port)
        assert worker.terminate() == 0

    assert (mode, elsewhere) == (0o700, False)
    assert list(folder.glob("housekeeping-metrics-*")) == []


def _listens(host: str, port: int) -> bool:
    with socket.socket() as asking:
        return asking.connect_ex((host, port)) == 0


def _address_of_this_machine() -> str:
    # Every address in 127.0.0.0/8 is local, but the page listens on the named one only.
    return "127.0.0.2"


@pytest.mark.parametrize(("command", "setting"), [("worker", "METRICS_PORT"), ("scheduler", "SCHEDULER_METRICS_PORT")])
def test_port_in_use_ends_the_command_with_one_line(
    command: str, setting: str, environment: dict[str, str], postgres: Database
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        environment[f"HOUSEKEEPING_{setting}"] = str(taken.getsockname()[1])
        ended = subprocess.run([*HOUSEKEEPING, command], env=environment, capture_output=True, text=True, timeout=60)

    assert ended.returncode == 2
    assert f"HOUSEKEEPING_{setting} is" in ended.stderr and "Traceback" not in ended.stderr


def test_scheduler_page_shows_sent_and_missed_ticks(
    environment: dict[str, str], redis_client: redis.Redis, tmp_path: Path, postgres: Database
) -> None:
    others = [sweep.name for family in BUILT_IN for sweep in family.SWEEPS if sweep.name != STATUSES]
    environment["HOUSEKEEPING_WORKERS"] = json.dumps({name: {"enabled": False} for name in others})
    environment["HOUSEKEEPING_BUILT_IN"] = "all"  # their tables are missing
    this_minute = datetime.now(UTC).replace(second=0, microsecond=0)
    earlier: dict[str, Any] = {"tick": this_minute - timedelta(minutes=10), "trigger": "schedule", "message_id": None}
    runs.record(STATUSES, "skipped", "paused", **earlier)
    port, of_others = free_port(), tmp_path / "of_others"
    of_others.mkdir()
    own = {"HOUSEKEEPING_SCHEDULER_METRICS_PORT": str(port), "PROMETHEUS_MULTIPROC_DIR": str(of_others)}

    with started([*HOUSEKEEPING, "scheduler"], environment | own, tmp_path / "scheduler") as scheduler:
        eventually(shows(port, "housekeeping_ticks_sent_total", 1, worker=STATUSES), scheduler)
        page = read(port)

    assert list(of_others.iterdir()) == []
    assert page.value("housekeeping_ticks_missed_total", worker=STATUSES) in (9, 10)  # the minute may turn
    assert (page.value("housekeeping_last_tick_timestamp_seconds", worker=STATUSES) or 0) >= this_minute.timestamp()


def test_process_without_exporters_does_not_import_them(environment: dict[str, str]) -> None:
    # The first import of prometheus-client decides how values are stored, and costs 20 ms.
    program = (
        "import sys, housekeeping.app\n"
        "assert not {'prometheus_client', 'dramatiq.middleware.prometheus'} & set(sys.modules)"
    )

    ended = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=60)

    assert ended.returncode == 0, ended.stderr
