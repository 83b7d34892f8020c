"""Page docs/howto/redis-sentinel.md, followed as written, on servers that the page starts."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Final

import pytest

from housekeeping import Settings
from tests.acceptance.pages import in_a_shell, with_programs
from tests.acceptance.processes import eventually, started
from tests.internals.database import Database
from tests.internals.embedded import find_redis
from tests.rabbitmq_server import free_ports
from tests.unit.docs.blocks import ROOT, blocks

pytestmark = pytest.mark.slow

PAGE: Final = ROOT / "docs/howto/redis-sentinel.md"
PORTS: Final = ("6401", "6402", "26401", "26402", "26403")
DATABASE: Final = "postgresql://user:password@host:5432/app"


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """The reader's folder; the servers that the page starts there end with the test."""
    place = tmp_path / "reader"
    place.mkdir()
    yield place
    for file in place.rglob("*.pid"):
        with suppress(ProcessLookupError):  # killed by the page, if the test failed there
            os.kill(int(file.read_text()), signal.SIGKILL)


def test_page_leads_from_fresh_servers_through_a_failover(
    postgres: Database, settings: Settings, environment: dict[str, str], folder: Path
) -> None:
    ports = dict(zip(PORTS, map(str, free_ports(len(PORTS))), strict=True))

    def ours(text: str) -> str:
        text = re.sub("|".join(sorted(PORTS, key=len, reverse=True)), lambda found: ports[found[0]], text)
        return text.replace(DATABASE, settings.require_database_url())

    def line(role: str, replicas: str) -> str:
        return f"service shop, primary 127.0.0.1:{ports[role]}, {replicas}, 3 of 3 Sentinels answer"

    def shows(text: str, found: str) -> bool:
        return found in in_a_shell(text, environment, folder)

    programs = folder / "programs"
    programs.mkdir()
    (programs / "redis-server").symlink_to(find_redis().path)
    environment = with_programs({**environment, "HOUSEKEEPING_REPOSITORIES_ROOT": str(folder)}, programs)
    (folder / "@hashed").mkdir()
    servers, configure, two, kill, restart = (ours(each.text) for each in blocks(PAGE) if each.kind == "sh")
    own_broker, uploads = (ours(each.text) for each in blocks(PAGE) if each.kind == "python")
    settings_only = "".join(each for each in configure.splitlines(keepends=True) if each.startswith("export"))

    in_a_shell(servers, environment, folder)
    eventually(lambda: line("6401", "1 replica") in in_a_shell(configure, environment, folder))
    with (
        started(["bash", "-c", f"{settings_only}exec {two.splitlines()[0]}"], environment, folder / "worker") as worker,
        started(
            ["bash", "-c", f"{settings_only}exec {two.splitlines()[1]}"], environment, folder / "scheduler"
        ) as other,
    ):
        eventually(lambda: worker.said("Worker process is ready"), worker, other)
        eventually(lambda: "Periodiq" in other.text(), worker, other)
        for block, found in ((kill, line("6402", "0 replicas")), (restart, line("6402", "1 replica"))):
            # The page waits long enough for most machines. Its last line is repeated for a busy one.
            action, _, look = block.partition("sleep 15\n")
            in_a_shell(f"{settings_only}{action}", environment, folder)
            eventually(partial(shows, f"{settings_only}{look.strip()} || true", found), worker)
        for code in (own_broker, f"paths = ['a/b']\n{uploads}"):
            (folder / "own.py").write_text(code)
            in_a_shell(f"{settings_only}python -W error own.py", environment, folder)
        in_a_shell(f"{settings_only}housekeeping enqueue user_status_cleanup.batch", environment, folder)
        eventually(lambda: worker.said("Run ended"), worker, other)
        assert (worker.terminate(), other.terminate()) == (0, 0)
