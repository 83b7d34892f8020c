"""Pages of docs/on-call: their commands and outputs, run as written."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final

import pytest

from tests.acceptance.processes import eventually, started
from tests.installation import Installation
from tests.installation import installation as installation
from tests.installation import redis_of_installations as redis_of_installations
from tests.internals.core import PREFIX
from tests.internals.ledger import Run

pytestmark = pytest.mark.slow

HOWTO: Final = Path(__file__).parents[2] / "docs/howto"
#: A page for each question of a person on call.
PAGES: Final = (
    "what-runs-when",
    "last-nights-run",
    "what-would-it-do",
    "why-did-it-not-run",
    "stop-it",
    "what-is-slow",
    "alerts",
    "dashboard",
)
_BLOCK: Final = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_SERVES: Final = "housekeeping web\n"
_ADDRESS: Final = "http://127.0.0.1:9292/"
#: Last line of `doctor` when it only warns.
_WELL: Final = {"housekeeping doctor\n": (0, 3)}


def _blocks(page: str) -> list[tuple[str, str]]:
    return _BLOCK.findall((HOWTO / f"{page}.md").read_text(encoding="utf-8"))


def _form(line: str) -> str:
    """Return a line without its variable parts: numbers, units of time, widths of columns."""
    line = re.sub(r"\d[\d,.:]*", "0", line)
    return re.sub(r"\s+", " ", re.sub(r"\b0 (ms|s|min|h|d)\b", "0 s", line)).strip()


def _last(hour: int) -> datetime:
    now = datetime.now(UTC)
    at = now.replace(hour=hour, minute=0, second=0, microsecond=0)
    return at if at <= now else at - timedelta(days=1)


def _ran(worker: str, tick: datetime, outcome: str, seconds: float, reason: str | None = None, **counts: int) -> None:
    ended = tick + timedelta(seconds=seconds)
    Run.insert(
        worker=worker,
        trigger="schedule",
        tick=tick,
        started_at=tick,
        heartbeat_at=ended,
        finished_at=ended,
        outcome=outcome,
        reason=reason,
        counts=counts,
    ).execute()


@pytest.fixture
def history(installation: Installation) -> Installation:
    """Create an installation with last night's runs, one of which took long."""
    _ran("bulk_imports.stale_import", _last(4), "lost", 20, "taken_over", timed_out_imports=100, batches=1)
    _ran("bulk_imports.stale_import", _last(4), "done", 2, timed_out_imports=20, timed_out_entities=90, batches=2)
    _ran("object_storage.delete_stale_direct_uploads", _last(3), "skipped", 0, "lease_held")
    _ran("user_status_cleanup.batch", _last(0), "done", 70, deleted_rows=9000, batches=90)
    installation.environment[f"{PREFIX}WEB_TOKEN"] = "a-token-of-the-tests"
    return installation


class _Reader:
    """Reader who follows a page block by block in one shell."""

    def __init__(self, installation: Installation, folder: Path) -> None:
        self._installation = installation
        self._folder = folder
        self._address = _ADDRESS
        self._said = ""
        self._stack = ExitStack()

    def __enter__(self) -> _Reader:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def do(self, kind: str, text: str) -> None:
        {"sh": self._run, "text": self._compare, "sql": self._query}[kind](text)

    def _run(self, block: str) -> None:
        if block == _SERVES:
            self._serve()
            return
        ended = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", block.replace(_ADDRESS, self._address)],
            env=self._installation.environment,
            cwd=self._installation.folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert ended.returncode in _WELL.get(block, (0,)), f"{block}{ended.stdout}{ended.stderr}"
        self._said = ended.stdout

    def _serve(self) -> None:
        command = [sys.executable, "-m", "housekeeping", "web", "--port", "0"]
        process = self._stack.enter_context(started(command, self._installation.environment, self._folder / "web.log"))
        eventually(lambda: re.search(r"http://\S+/", process.text()), process)
        found = re.search(r"http://\S+/", process.text())
        assert found is not None
        self._address = found[0]

    def _compare(self, block: str) -> None:
        came = [_form(line) for line in self._said.splitlines()]
        missing = [line for line in map(_form, block.splitlines()) if line not in came]
        assert missing == [], self._said

    def _query(self, block: str) -> None:
        own = block.replace("housekeeping.", f"{self._installation.settings.schema_name}.")
        with self._installation.admin.cursor() as cursor:
            cursor.execute(own)
            assert cursor.fetchall()


@pytest.mark.parametrize("page", PAGES)
def test_commands_of_an_on_call_page_work_as_shown(history: Installation, tmp_path: Path, page: str) -> None:
    blocks = _blocks(page)
    if any("curl" in text for _, text in blocks) and shutil.which("curl") is None:
        pytest.skip("curl is not installed")

    with _Reader(history, tmp_path) as reader:
        for kind, text in blocks:
            reader.do(kind, text)

    assert "sh" in {kind for kind, _ in blocks}
