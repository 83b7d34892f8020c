"""Pages celery.md, arq.md and fastapi.md of docs/howto, followed with the real packages; then a process is killed.

arq allows another redis-py than the other tests use. `tox -e arq` runs its page.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import pytest
import redis
from psycopg2.extensions import connection as Connection

from housekeeping import Settings
from tests.acceptance import pages
from tests.acceptance.pages import in_a_shell, with_programs
from tests.acceptance.processes import Process, eventually, started
from tests.command_processes import CommandProcesses
from tests.installation import Installation
from tests.installation import redis_of_installations as redis_of_installations
from tests.internals.core import PREFIX
from tests.internals.database import Database
from tests.unit.docs.blocks import ROOT, Block, blocks

pytestmark = pytest.mark.slow

#: A worker or server of the page, which runs until it is stopped, and what it prints once it works.
_GOES_ON: Final = {
    "celery": re.compile(r"\bready\."),
    "arq": re.compile("Starting worker"),
    "uvicorn": re.compile("http://"),
}
_DAY: Final = "2026-11-29"
_OTHER_DAY: Final = "2026-11-30"


class Reader(pages.Reader):
    """Reader who starts two processes where the page starts one. Its Redis is the queue's only, if it has one."""

    def __init__(self, installation: Installation, folder: Path, log: Path) -> None:
        super().__init__(installation, folder)
        for name in ("REDIS_URL", "BROKER_URL"):
            del self.environment[f"{PREFIX}{name}"]
        self._log = log
        self.processes: list[Process] = []
        self.sending = ""

    def read(self, page: str) -> None:
        for block in blocks(ROOT / f"docs/howto/{page}.md"):
            self.do(block)

    def with_own_servers(self, text: str) -> str:
        # Celery's name for a socket.
        return super().with_own_servers(text).replace("CELERY_BROKER_URL=unix:", "CELERY_BROKER_URL=redis+socket:")

    def shell(self, block: Block) -> None:
        *before, last = block.text.splitlines()
        is_ready = _GOES_ON.get(last.partition(" ")[0])
        if is_ready is None:
            super().shell(block)
            return
        if before:
            super().shell(Block(block.page, block.line, block.kind, "\n".join(before), block.mark))
        for number in range(2):
            self._start(last.replace("8000", "0"), number, is_ready)

    def execute(self, block: Block) -> None:
        super().execute(block)
        if not block.text.startswith("# "):
            self.sending = self.with_own_servers(block.text)

    def _start(self, command: str, number: int, is_ready: re.Pattern[str]) -> None:
        name = f" --hostname={number}@host" if command.startswith("celery") else ""
        arguments = ["bash", "-c", f"cd {shlex.quote(str(self.folder))} && exec {command}{name}"]
        environment = {**self.environment, "PYTHONUNBUFFERED": "1", "PYTHONPATH": str(self.folder)}
        process = self._stack.enter_context(started(arguments, environment, self._log.with_suffix(f".{number}")))
        self.processes.append(process)
        eventually(lambda: is_ready.search(process.text()), process)
        if command.startswith("uvicorn"):
            self.address = f"{self.addresses[0]}/"

    @property
    def addresses(self) -> list[str]:
        return [re.findall(r"http://127\.0\.0\.1:\d+", process.text())[0] for process in self.processes]

    def send(self, day: str) -> None:
        """Send a report of this day, in the way of the page."""
        code = self.sending.replace(_DAY, day)
        subprocess.run([sys.executable, "-c", code], env=self.environment, cwd=self.folder, check=True, timeout=60)

    def holder(self) -> int | None:
        """Return the process that holds the lease of a report; None if it is free."""
        listed = json.loads(in_a_shell("housekeeping leases list --json", self.environment, self.folder))["leases"]
        reports = [each["process"] for each in listed if each["key"].startswith("report/")]
        return int(reports[0].rpartition(":")[2]) if reports else None

    def has_report(self, day: str) -> bool:
        return self.rows(f"SELECT count(*) FROM report WHERE day = '{day}'") == [(1,)]


@pytest.fixture
def reader(
    settings: Settings,
    postgres: Database,
    admin: Connection,
    redis_of_installations: str,
    environment: dict[str, str],
    command_processes: CommandProcesses,
    tmp_path: Path,
) -> Iterator[Reader]:
    environment |= {f"{PREFIX}REDIS_URL": redis_of_installations}
    client = redis.Redis.from_url(redis_of_installations)
    installation = Installation(
        settings, admin, client, tmp_path, with_programs(environment, command_processes.folder), command_processes
    )
    with Reader(installation, tmp_path / "reader", tmp_path / "log") as reader:
        yield reader
    client.close()


@pytest.mark.parametrize("package", ["celery", "arq"])
def test_page_of_a_queue_works_as_written_and_another_worker_takes_over(
    reader: Reader, package: str, redis_of_installations: str, admin: Connection
) -> None:
    # L1, L3: a worker is killed before its commit, and Redis is emptied
    pytest.importorskip(package)
    reader.read(package)
    eventually(lambda: reader.has_report(_DAY), *reader.processes)
    eventually(lambda: reader.rows("SELECT count(*) FROM user_session") == [(800,)], *reader.processes)

    def kill_holder() -> None:
        reader.send(_OTHER_DAY)
        eventually(lambda: reader.holder(), *reader.processes)
        os.killpg(os.getpgid(reader.holder() or 0), signal.SIGKILL)
        redis.Redis.from_url(redis_of_installations).flushall()

    while_locked(admin, kill_holder)
    assert reader.holder() is not None, "the lease stays until its ttl"
    reader.send(_OTHER_DAY)

    eventually(lambda: reader.has_report(_OTHER_DAY), *reader.processes)
    eventually(lambda: reader.holder() is None, *reader.processes)
    assert sorted(process.running.poll() is None for process in reader.processes) == [False, True]


def test_page_of_fastapi_works_as_written_and_another_process_takes_over(reader: Reader, admin: Connection) -> None:
    # L1, L3, R5
    reader.read("fastapi")
    assert reader.has_report(_DAY)
    eventually(lambda: reader.rows("SELECT count(*) FROM user_session") == [(800,)], *reader.processes)
    first, second = reader.addresses

    def kill_first() -> None:
        threading.Thread(target=post, args=(first,), daemon=True).start()
        eventually(lambda: reader.holder(), *reader.processes)
        assert post(second) == 409
        reader.processes[0].kill()

    while_locked(admin, kill_first)

    eventually(lambda: post(second) == 200, *reader.processes)
    assert reader.has_report(_OTHER_DAY)
    assert reader.processes[1].terminate() in (0, -signal.SIGTERM)
    assert reader.holder() is None


def post(address: str) -> int:
    """Request the report of the other day; return the status, 0 if the server was killed."""
    request = urllib.request.Request(f"{address}/reports/{_OTHER_DAY}", method="POST")
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            status: int = answer.status
            return status
    except urllib.error.HTTPError as error:
        error.close()
        return error.code
    except OSError:
        return 0


def while_locked(admin: Connection, act: Callable[[], Any]) -> None:
    """Act while nothing can be written into the table of reports."""
    with admin.cursor() as cursor:
        cursor.execute("BEGIN; LOCK TABLE report IN SHARE MODE")
        try:
            act()
        finally:
            cursor.execute("ROLLBACK")
