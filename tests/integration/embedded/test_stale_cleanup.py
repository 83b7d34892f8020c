from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
import redis

from tests.integration.embedded.observing import answers_of, ended, eventually, parent, segments, shared_memory, traces
from tests.internals.embedded import clear_leftovers, create_folder, embedded

IPC_PRIVATE, IPC_RMID = 0, 0


def leave_behind(place: Path) -> Path:
    """Folder of a killed run without running processes."""
    folder, lock = create_folder([place], user=None)
    os.close(lock)
    return folder


@contextmanager
def stranger(cwd: Path) -> Iterator[psutil.Process]:
    with subprocess.Popen(["sleep", "600"], cwd=cwd) as process:
        try:
            yield psutil.Process(process.pid)
        finally:
            process.kill()


@pytest.mark.slow
def test_next_start_cleans_up_after_a_killed_guard_only(place: Path) -> None:
    with embedded.start(postgres=False) as neighbour, redis.Redis.from_url(neighbour.redis_url) as client:
        with parent() as victim:
            segment = shared_memory(victim.folder)
            guard = victim.guard()
            guard.kill()
            victim.process.kill()
            assert eventually(lambda: ended(guard))
        assert answers_of(victim.database_url, victim.redis_url) == (1, True)

        with embedded.start(postgres=False):
            assert not victim.folder.exists()
            assert segment not in segments()
            assert client.ping()

    assert traces(place, segment) == []


@pytest.mark.slow
def test_shared_memory_of_a_killed_postgres_is_released(place: Path) -> None:
    with parent("servers.kill('postgres')") as victim:
        segment = shared_memory(victim.folder)
        guard = victim.guard()
        guard.kill()
        victim.process.kill()
        assert eventually(lambda: ended(guard))
    assert list(segments()).count(segment) == Path("/proc/sysvipc/shm").exists()

    clear_leftovers([place])

    assert traces(place, segment) == []


def test_process_with_a_reused_id_is_not_killed(place: Path) -> None:
    left = leave_behind(place)
    (left / "pg" / "data").mkdir(parents=True)
    with stranger(cwd=place) as sleeper:
        (left / "pg" / "data" / "postmaster.pid").write_text(f"{sleeper.pid}\n{left}/pg/data\n")

        clear_leftovers([place])

        assert not left.exists()
        assert sleeper.status() == psutil.STATUS_SLEEPING


@pytest.mark.slow
def test_shell_in_an_abandoned_folder_is_not_killed(place: Path) -> None:
    left = leave_behind(place)
    with stranger(cwd=left) as sleeper:
        clear_leftovers([place])

        assert not left.exists()
        assert sleeper.status() == psutil.STATUS_SLEEPING


@pytest.mark.slow
def test_shared_memory_with_a_reused_id_is_kept(place: Path) -> None:
    left = leave_behind(place)
    libc = ctypes.CDLL(None)
    segment = libc.shmget(IPC_PRIVATE, ctypes.c_size_t(64), 0o600)
    (left / "pg" / "data").mkdir(parents=True)
    (left / "pg" / "data" / "postmaster.pid").write_text(f"1\n2\n3\n4\n5\n6\n 4711 {segment}\nready\n")
    try:
        clear_leftovers([place])

        assert not left.exists()
        assert libc.shmctl(segment, IPC_RMID, None) == 0
    finally:
        libc.shmctl(segment, IPC_RMID, None)


def test_folder_with_a_similar_name_is_kept(place: Path) -> None:
    alike = place / "housekeeping-receipts"
    alike.mkdir()
    (alike / "electricity.txt").write_text("paid")

    clear_leftovers([place])

    assert (alike / "electricity.txt").read_text() == "paid"


def test_link_with_a_similar_name_is_not_followed(place: Path) -> None:
    target = leave_behind(place).rename(place / "elsewhere")
    (place / "housekeeping-abcd1234").symlink_to(target)

    clear_leftovers([place])

    assert target.is_dir()
    assert (place / "housekeeping-abcd1234").is_symlink()


def test_empty_abandoned_folder_is_removed(place: Path) -> None:
    (place / "housekeeping-abcd1234").mkdir()

    clear_leftovers([place])

    assert list(place.iterdir()) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make another user's folder")
def test_root_ignores_folders_of_other_users(place: Path) -> None:
    left = leave_behind(place)
    os.chown(left, 4711, 4711)

    clear_leftovers([place])

    assert left.is_dir()


@pytest.mark.slow
def test_folder_being_created_is_never_abandoned(place: Path) -> None:
    made: list[bool] = []
    done = threading.Event()

    def clear_all_the_time() -> None:
        while not done.is_set():
            clear_leftovers([place])

    clearer = threading.Thread(target=clear_all_the_time)
    clearer.start()
    try:
        for _ in range(500):
            folder, lock = create_folder([place], user=None)
            made.append(folder.is_dir())
            shutil.rmtree(folder)
            os.close(lock)
    finally:
        done.set()
        clearer.join()

    assert made == [True] * 500
    assert list(place.iterdir()) == []
