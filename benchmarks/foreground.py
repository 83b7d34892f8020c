"""Latency of an application (pgbench at a steady rate), alone and beside a sweep with and without throttles."""

from __future__ import annotations

import json
import os
import select
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median, quantiles
from typing import Any, Final

import redis

from benchmarks.comparison import FLOOR, Comparison, Place
from benchmarks.contestants import composed, ours, run
from benchmarks.rounds import answer, process
from benchmarks.servers import Servers, Stage
from benchmarks.tables import STATUSES, STATUSES_FLOOR, fill_statuses
from housekeeping import Delete, Guard, Rows, Sweep
from housekeeping.engine.purge import PurgeRequest, sweep_of
from housekeeping.workers.user_status_cleanup.models import UserStatus

NAME: Final = "foreground"
_ALONE: Final = "alone"
_RATE: Final = 200  # transactions per second, low enough that waiting shows
_SECONDS: Final = 10  # transactions after the end of the sweep do not count
_SCALE: Final = 5  # 500,000 accounts
_ROWS: Final = 1_000_000
_FEWEST: Final = 200  # transactions beside a sweep
_BESIDE_S: Final = 6.0

#: As it is declared without any limit.
_GROW: Final = Sweep(
    "statuses.grow",
    Rows(UserStatus, stale=lambda row, now: row.clear_status_at <= now, order="clear_status_at", action=Delete()),
    guard=Guard(first_run=False),
)


def _purge(place: Place) -> Callable[[], object]:
    composed(place, _GROW.name, sweeps=[_GROW])
    request = PurgeRequest(table="user_statuses", where="clear_status_at <= now()", order_by=("clear_status_at",))
    sweep = sweep_of(request)
    return lambda: run(sweep, confirmed=True, noted=request.as_count())


def _compute(place: Place) -> Callable[[], object]:
    """Return a program without PostgreSQL, which takes one of the cores."""

    def work() -> None:
        end, number = time.monotonic() + _BESIDE_S, 0
        while time.monotonic() < end:
            number = (number * 31 + 7) % 1_000_003

    return work


def _flush(place: Place) -> Callable[[], object]:
    """Return a program without PostgreSQL, which writes a file to disk as often as commits do."""

    def work() -> None:
        end = time.monotonic() + _BESIDE_S
        with tempfile.TemporaryFile() as file:
            while time.monotonic() < end:
                os.pwrite(file.fileno(), bytes(16_384), 0)
                os.fsync(file.fileno())

    return work


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
        "beside a sweep, batches that grow": ours(_GROW.name, sweeps=[_GROW]),
        "beside a purge": _purge,
        # What any program does that deletes at full speed on this machine.
        **{
            f"beside a hand-written loop, batches of {size:,}": replace(STATUSES_FLOOR, batch=size).contestants()[FLOOR]
            for size in (100, 2_000)
        },
        # Which of a sweep's loads the application waits for.
        "beside a loop that only computes": _compute,
        "beside a loop that only writes to disk": _flush,
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
            return _latencies(stage.servers, pgbench, database, Path(folder), lambda: None)
        told = {"comparison": NAME, "contestant": name, "rows": _ROWS, "folder": folder}
        told |= {"database_url": stage.servers.database_url(database), "redis_url": stage.servers.redis_url}
        with process(Path(folder)) as sweep:
            answer(sweep, json.dumps(told), Path(folder))
            assert sweep.stdin is not None and sweep.stdout is not None
            began = time.time()
            sweep.stdin.write("go\n")
            sweep.stdin.flush()

            def until() -> float | None:
                """Return when the sweep ended, in seconds since 1970; None if it is still working."""
                assert sweep.stdout is not None
                if not select.select([sweep.stdout], [], [], 0)[0]:
                    return None
                line = sweep.stdout.readline()
                if not line:
                    raise RuntimeError("the sweep failed beside its foreground")
                return began + float(json.loads(line)["seconds"])

            latencies = _latencies(stage.servers, pgbench, database, Path(folder), until)
            sweep.kill()
        return latencies


def _latencies(
    servers: Servers, pgbench: Path, database: str, folder: Path, until: Callable[[], float | None]
) -> tuple[float, float]:
    """Return p50 and p99 of the transactions in milliseconds, measured from their due time.

    Parameters:
      until: Returns the time after which transactions do not count; None if all count.
    """
    _run(
        servers, pgbench, database, "-n", "-M", "prepared", "-c", "4", "-R", str(_RATE), "-T", str(_SECONDS),
        "-l", f"--log-prefix={folder}/pgbench",
    )  # fmt: skip
    lines = [line.split() for file in folder.glob("pgbench.*") for line in file.read_text().splitlines()]
    end = until()
    # The columns 2, 4 and 5: latency in microseconds, and the end in seconds and microseconds.
    counted = [int(line[2]) / 1000 for line in lines if end is None or int(line[4]) + int(line[5]) / 1e6 <= end]
    if len(counted) < _FEWEST:
        raise RuntimeError(f"only {len(counted)} transactions ran beside the sweep")
    hundredths = quantiles(counted, n=100)
    return hundredths[49], hundredths[98]


def _run(servers: Servers, pgbench: Path, database: str, *arguments: str) -> None:
    command = [str(pgbench), "-h", str(servers.postgres_socket), "-U", "postgres", *arguments, database]
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL, capture_output=True)
