"""Latency of an application (pgbench at a steady rate), alone and beside a sweep with and without throttles."""

from __future__ import annotations

import json
import subprocess
import tempfile
from pathlib import Path
from statistics import median, quantiles
from typing import Any, Final

import redis

from benchmarks.comparison import Comparison
from benchmarks.contestants import ours
from benchmarks.rounds import answer, process
from benchmarks.servers import Servers, Stage
from benchmarks.tables import STATUSES, fill_statuses
from housekeeping.workers.user_status_cleanup.models import UserStatus

NAME: Final = "foreground"
_ALONE: Final = "alone"
_RATE: Final = 200  # transactions per second, low enough that waiting shows
_SECONDS: Final = 10
_SCALE: Final = 5  # 500,000 accounts
_ROWS: Final = 1_000_000  # more than a sweep processes meanwhile


#: Used by the processes of the turns; its rows are not counted.
COMPARISON: Final = Comparison(
    name=NAME,
    template=NAME,
    models=(UserStatus,),
    fill=fill_statuses,
    undone=lambda place: 0,
    targets={},
    contestants={
        "beside a sweep, gates on": ours(STATUSES),
        "beside a sweep, gates off": ours(
            STATUSES, gates={"replication_lag_s": None, "waiting_locks": None, "vacuum": False}
        ),
    },
)


def measure(stage: Stage, rounds: int) -> dict[str, Any]:
    """Return the median p50 and p99 in milliseconds by contestant; empty without pgbench."""
    pgbench = stage.servers.programs / "pgbench"
    if not pgbench.is_file():
        return {}
    template = stage.template(NAME, [UserStatus], lambda connection: fill_statuses(connection, _ROWS, _ROWS))
    with stage.connected(template) as made, made.cursor() as cursor:
        cursor.execute("SELECT to_regclass('pgbench_accounts') IS NULL")
        if cursor.fetchone() == (True,):
            _run(stage.servers, pgbench, template, "-i", "-q", "-s", str(_SCALE))
    found: dict[str, list[tuple[float, float]]] = {}
    for _ in range(rounds):
        for name in (_ALONE, *COMPARISON.contestants):
            found.setdefault(name, []).append(_turn(stage, pgbench, template, name))
    return {
        name: {"p50_ms": median(p50 for p50, _ in turns), "p99_ms": median(p99 for _, p99 in turns)}
        for name, turns in found.items()
    }


def _turn(stage: Stage, pgbench: Path, template: str, name: str) -> tuple[float, float]:
    redis.Redis.from_url(stage.servers.redis_url).flushall()
    with stage.copy_of(template) as database, tempfile.TemporaryDirectory() as folder:
        if name == _ALONE:
            return _latencies(stage.servers, pgbench, database, Path(folder))
        told = {"comparison": NAME, "contestant": name, "rows": _ROWS, "folder": folder}
        told |= {"database_url": stage.servers.database_url(database), "redis_url": stage.servers.redis_url}
        with process(Path(folder)) as sweep:
            answer(sweep, json.dumps(told), Path(folder))
            assert sweep.stdin is not None
            sweep.stdin.write("go\n")
            sweep.stdin.flush()
            latencies = _latencies(stage.servers, pgbench, database, Path(folder))
            if sweep.poll() is not None:
                raise RuntimeError("the sweep ended before its foreground")
            sweep.kill()
        return latencies


def _latencies(servers: Servers, pgbench: Path, database: str, folder: Path) -> tuple[float, float]:
    """Return p50 and p99 of the transactions in milliseconds, measured from their due time."""
    _run(
        servers, pgbench, database, "-n", "-M", "prepared", "-c", "4", "-R", str(_RATE), "-T", str(_SECONDS),
        "-l", f"--log-prefix={folder}/pgbench",
    )  # fmt: skip
    lines = [line.split() for file in folder.glob("pgbench.*") for line in file.read_text().splitlines()]
    hundredths = quantiles((int(line[2]) / 1000 for line in lines), n=100)
    return hundredths[49], hundredths[98]


def _run(servers: Servers, pgbench: Path, database: str, *arguments: str) -> None:
    command = [str(pgbench), "-h", str(servers.postgres_socket), "-U", "postgres", *arguments, database]
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL, capture_output=True)
