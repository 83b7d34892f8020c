"""Observation of servers from the outside, and other processes that start servers."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import psutil
import psycopg2
import redis

PATIENCE: Final = 30  # seconds; not a pass mark, only the end of a hopeless wait

#: Starts servers, does `{during}`, says where they are and what is in `told`, and holds them until its input ends.
PARENT: Final = """
import os, select, signal, sys
from housekeeping import embedded
with embedded.start(postgres={postgres}) as servers:
    told = ""
    {during}
    print(servers.folder, servers.database_url if {postgres} else "", servers.redis_url, told, sep=" ", flush=True)
    # Not one long read: a signal that comes just before it is handled after it.
    while not select.select([sys.stdin], [], [], 0.1)[0]:
        pass
"""


@dataclass
class Parent:
    """Another process that runs servers."""

    process: subprocess.Popen[str]
    folder: Path
    database_url: str
    redis_url: str
    told: str

    def guard(self) -> psutil.Process:
        (guard,) = (child for child in psutil.Process(self.process.pid).children() if "flock" in child.cmdline()[3])
        return guard


def run_parent(
    during: str = "pass", *, postgres: bool = True, python: str = sys.executable, **options: Any
) -> subprocess.Popen[str]:
    """Start a process that starts servers, in a process group of its own, and do not wait for them."""
    command = [python, "-c", PARENT.format(during=during, postgres=postgres)]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, process_group=0, **options)


@contextmanager
def parent(during: str = "pass", **options: Any) -> Iterator[Parent]:
    """Process with running servers, started by `run_parent`; ends after the test."""
    with run_parent(during, **options) as process:
        try:
            assert process.stdout is not None
            folder, database_url, redis_url, told = process.stdout.readline().rstrip("\n").split(" ", 3)
            yield Parent(process, Path(folder), database_url, redis_url, told)
            process.communicate(timeout=PATIENCE)
        finally:
            process.kill()


def ended(process: psutil.Process) -> bool:
    """Return whether a process has ended or is a zombie."""
    try:
        return bool(process.status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


def answers_of(database_url: str, redis_url: str) -> tuple[int, bool]:
    """Query PostgreSQL and Redis; ``(1, True)`` if both work."""
    with redis.Redis.from_url(redis_url) as client:
        pong = bool(client.ping())
    return int(query(database_url, "SELECT 1")), pong


def query(database_url: str, statement: str) -> Any:
    """The first value of the first row, or None; committed."""
    connection = psycopg2.connect(database_url)
    try:
        with connection, connection.cursor() as cursor:
            cursor.execute(statement)
            return cursor.fetchone()[0] if cursor.description else None
    finally:
        connection.close()


def processes_in(place: Path) -> list[psutil.Process]:
    """Return all processes with `place` as working folder or in their arguments; `info` has names and accounts."""
    return [
        process
        for process in psutil.process_iter(["name", "cwd", "cmdline", "username"])
        if str(place) in " ".join([process.info["cwd"] or "", *(process.info["cmdline"] or [])])
    ]


def shared_memory(folder: Path) -> int:
    """The number of the System V segment that PostgreSQL in `folder` holds."""
    return int((folder / "pg" / "data" / "postmaster.pid").read_text().splitlines()[6].split()[1])


def segments() -> set[int]:
    """The numbers of all System V segments; nothing where the system does not list them."""
    listing = Path("/proc/sysvipc/shm")
    lines = listing.read_text().splitlines()[1:] if listing.exists() else []
    return {int(line.split()[1]) for line in lines}


def traces(place: Path, segment: int) -> list[object]:
    """Return the remains of servers in `place`: files, processes, shared memory."""
    return [*place.iterdir(), *processes_in(place), *segments().intersection({segment})]


def eventually(reached: Callable[[], bool]) -> bool:
    """Wait for a condition; return whether it came true."""
    deadline = time.monotonic() + PATIENCE
    while not reached():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def fake_program(path: Path, version: str, otherwise: str = "exit 1") -> Path:
    """Write a program that prints `version` for ``--version`` and otherwise executes `otherwise`."""
    path.write_text(f'#!/bin/sh\n[ "$1" = --version ] && {{ echo "{version}"; exit; }}\n{otherwise}\n')
    path.chmod(0o755)
    return path
