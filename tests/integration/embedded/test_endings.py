from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import psutil
import pytest
import redis

from tests.integration.embedded.observing import (
    PATIENCE,
    ended,
    eventually,
    fake_program,
    parent,
    processes_in,
    run_parent,
    shared_memory,
    traces,
)
from tests.internals.embedded import embedded

# Not by print: the signal may come while the line before is still being flushed.
SURVIVE_CTRL_C = """
    def survive(number, frame):
        servers.restart("redis")
        os.write(1, b"survived\\n")
    signal.signal(signal.SIGINT, survive)
"""
# The child closes what it has of the test's pipes, so that only the lock of the folder is in question.
FORK = """
    child = os.fork()
    if not child:
        os.closerange(0, 3)
        signal.pause()
    told = child
"""


def test_leaving_the_block_removes_every_trace(place: Path) -> None:
    with embedded.start() as servers:
        segment = shared_memory(servers.folder)
        assert len(traces(place, segment)) > 3

    assert traces(place, segment) == []


def test_error_in_the_block_is_raised_after_the_cleanup(place: Path) -> None:
    with pytest.raises(ZeroDivisionError), embedded.start(postgres=False):
        raise ZeroDivisionError

    assert traces(place, segment=-1) == []


@pytest.mark.parametrize("number", [pytest.param(signal.SIGTERM, marks=pytest.mark.slow), signal.SIGKILL])
def test_killed_parent_leaves_no_trace(place: Path, number: signal.Signals) -> None:
    with parent() as victim:
        segment = shared_memory(victim.folder)

        victim.process.send_signal(number)
        victim.process.wait(PATIENCE)

    assert victim.process.returncode == -number
    assert eventually(lambda: traces(place, segment) == [])


@pytest.mark.slow
def test_parent_killed_during_initdb_leaves_no_trace(place: Path, programs: Path) -> None:
    fake_program(programs / "postgres", "postgres (PostgreSQL) 16.1")
    fake_program(programs / "initdb", "initdb (PostgreSQL) 16.1", "while :; do /bin/sleep 0.1; done")
    with run_parent() as victim:
        assert eventually(lambda: "initdb" in {process.info["name"] for process in processes_in(place)})
        victim.kill()

    assert eventually(lambda: [path.name for path in place.iterdir()] == ["bin"])
    assert eventually(lambda: processes_in(place) == [])


@pytest.mark.slow
def test_ctrl_c_ends_parent_and_servers_without_a_trace(place: Path) -> None:
    with parent(stderr=subprocess.DEVNULL) as victim:
        segment = shared_memory(victim.folder)

        os.killpg(victim.process.pid, signal.SIGINT)
        victim.process.wait(PATIENCE)

        assert victim.process.returncode == -signal.SIGINT
        assert traces(place, segment) == []


def test_ctrl_c_does_not_reach_guard_and_servers(place: Path) -> None:
    with parent(SURVIVE_CTRL_C, postgres=False) as survivor, redis.Redis.from_url(survivor.redis_url) as client:
        os.killpg(survivor.process.pid, signal.SIGINT)

        assert survivor.process.stdout is not None
        assert survivor.process.stdout.readline() == "survived\n"
        assert client.ping()


@pytest.mark.slow
def test_forked_child_does_not_keep_servers_of_a_killed_parent(place: Path) -> None:
    with parent(FORK, postgres=False) as victim:
        child = psutil.Process(int(victim.told))

        try:
            victim.process.kill()
            victim.process.wait(PATIENCE)

            assert eventually(lambda: traces(place, segment=-1) == [])
            assert child.is_running()
        finally:
            child.kill()


@pytest.mark.slow
def test_close_does_not_need_the_guard(place: Path) -> None:
    with parent() as survivor:
        segment = shared_memory(survivor.folder)
        guard = survivor.guard()
        guard.kill()
        assert eventually(lambda: ended(guard))

    assert survivor.process.returncode == 0
    assert traces(place, segment) == []
