"""A reader who follows pages of the documentation as written: the one runner of their blocks."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final, Self

from tests.acceptance.processes import eventually, started
from tests.installation import Installation
from tests.internals.workers import BUILT_IN
from tests.unit.docs.blocks import Block

#: Placeholders for a reader's own servers.
_DATABASE: Final = re.compile(r"postgresql://user:password@host:5432/\w+")
_REDIS: Final = re.compile(r"redis://host:6379/\d")
#: .ci/run and tests/acceptance/test_demo.py run the installation, the demo and the suites from an empty folder.
_DONE_ELSEWHERE: Final = re.compile(
    r"^(?:python3 -m venv|\S*pip (?:install|wheel)|\S*housekeeping demo|pytest|HOUSEKEEPING_TEST_|PATH=.* tox )"
    r"(?:.*\\\n)*.*$",
    re.MULTILINE,
)
#: Programs that run until they are stopped: stopped as soon as they work.
_GOES_ON: Final = re.compile(r"^((?:housekeeping (?:worker|scheduler|web)|dramatiq|periodiq)\b)", re.MULTILINE)
#: The server that a page talks to afterwards, and where that page finds it.
_SERVER: Final = re.compile(r"(?:housekeeping web|uvicorn|flask|python manage\.py runserver)\b.*\n")
_ADDRESS: Final = re.compile(r"http://127\.0\.0\.1:(?:9292|8000)/")
#: First line of a module that a page creates.
_MODULE: Final = re.compile(r"# (\S+\.py)\n")
#: It may warn of the small servers of the tests.
_DOCTOR: Final = re.compile(r"^(housekeeping doctor)$", re.MULTILINE)
_LISTENING: Final = re.compile(r"http://127\.0\.0\.1:[1-9]\d*")
_SERVE: Final = r"""
serve() {
    local said; said=$(mktemp)
    "$@" >"$said" 2>&1 & local program=$!
    until grep -Eq 'ready for action|http://127|Periodiq .* started|Scheduling' "$said"; do
        kill -0 $program || { cat "$said"; return 1; }
        sleep 0.1
    done
    kill -TERM $program
    wait $program || [ $? -eq 143 ] || { cat "$said"; return 1; }
}
"""


def with_programs(environment: Mapping[str, str], *folders: Path) -> dict[str, str]:
    """Return the environment with the library's programs, and those in these folders, on the PATH."""
    path = [*map(str, folders), str(Path(sys.executable).parent), environment.get("PATH", os.defpath)]
    return {**environment, "PATH": os.pathsep.join(path)}


def in_a_shell(text: str, environment: Mapping[str, str], folder: Path) -> str:
    """Run a block of shell commands and return what it prints; a doctor that only warns does not fail it."""
    return _run(["bash", "-euo", "pipefail", "-c", _DOCTOR.sub(r"\1 || [ $? -eq 3 ]", text)], environment, folder, text)


def _run(command: list[str], environment: Mapping[str, str], folder: Path, shown: str) -> str:
    ended = subprocess.run(
        command,
        env=dict(environment),
        cwd=folder,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert ended.returncode == 0, f"{shown}\n{ended.stdout}\n{ended.stderr}"
    return ended.stdout


class Reader:
    """Reader who follows a page block by block, in one shell and one Python program."""

    def __init__(self, installation: Installation, folder: Path) -> None:
        self.folder = folder
        self.environment = dict(installation.environment)
        self._installation = installation
        self.address = ""
        self._said = ""
        self._python = ""
        self._last = ""
        self._stack = ExitStack()
        folder.mkdir()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def do(self, block: Block) -> list[tuple[Any, ...]]:
        """Carry out a block, or compare it with what the last one printed; return the rows of a query."""
        steps = {"sh": self.shell, "python": self.execute, "sql": self.query, "json": self._compare, "text": self.show}
        rows = steps[block.kind](block)
        self._last = block.kind
        return rows or []

    def with_own_servers(self, text: str) -> str:
        """Return the text with the servers of the test in place of the page's."""
        text = _DATABASE.sub(lambda found: self._installation.environment["HOUSEKEEPING_DATABASE_URL"], text)
        text = _REDIS.sub(lambda found: self._installation.environment["HOUSEKEEPING_REDIS_URL"], text)
        return _ADDRESS.sub(self.address, text) if self.address else text

    def shell(self, block: Block) -> None:
        if _SERVER.fullmatch(block.text):
            self._serve(block.text)
            return
        text = _GOES_ON.sub(r"serve \1", _DONE_ELSEWHERE.sub("", self.with_own_servers(block.text)))
        if "--with-sample-data" in text:
            _empty_tables()
        kept = self.folder / "environment"
        # Exported variables hold for the next blocks; every setting must exist.
        check = f"{sys.executable} -c 'from housekeeping.core.settings import Settings; Settings.load()'\n"
        end = f"{check if 'export ' in text else ''}env -0 > {kept}"
        self._said = in_a_shell(f"{_SERVE}{text}\n{end}", self.environment, self.folder)
        self.environment = dict(one.split("=", 1) for one in kept.read_text().split("\0") if "=" in one)

    def _serve(self, command: str) -> None:
        """Start a server on a free port, and wait until it has printed its address."""
        if command == "housekeeping web\n":
            command = "housekeeping web --port 0"
        environment = {**self.environment, "PYTHONUNBUFFERED": "1"}
        exec_there = ["bash", "-c", f"cd {shlex.quote(str(self.folder))} && exec {command.replace('8000', '0')}"]
        process = self._stack.enter_context(started(exec_there, environment, self.folder / "server.log"))
        eventually(lambda: _LISTENING.search(process.text()), process)
        self.address = f"{_LISTENING.findall(process.text())[0]}/"

    def execute(self, block: Block) -> None:
        module = _MODULE.match(block.text)
        if module is not None:
            path = self.folder / module[1]
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(self.with_own_servers(block.text))
            return
        # Imports and variables of earlier blocks on the page are available.
        self._python += f"{self.with_own_servers(block.text)}\n"
        _run([sys.executable, "-W", "error", "-c", self._python], self.environment, self.folder, block.place)

    def query(self, block: Block) -> list[tuple[Any, ...]]:
        own = self._installation.settings.schema_name
        text = re.sub(r"\bhousekeeping\.", f"{own}.", block.text)
        text = re.sub(r"SCHEMA housekeeping\b", f"SCHEMA {own}", text)
        return self.rows(re.sub(r"(TO|ROLE) housekeeping\b", rf"\1 reader_{os.getpid()}", text))

    def rows(self, query: str) -> list[tuple[Any, ...]]:
        """Execute a statement in the database; return its rows."""
        with self._installation.admin.cursor() as cursor:
            cursor.execute(query)
            return list(cursor.fetchall()) if cursor.description else []

    def show(self, block: Block) -> None:
        """Assert that the command right before printed every line; a block after no command is a picture."""
        if self._last == "sh":
            came = [_form(line) for line in self._said.splitlines()]
            assert [line for line in map(_form, block.text.splitlines()) if line not in came] == [], self._said

    def _compare(self, block: Block) -> None:
        assert _shape(json.loads(self._said)) == _shape(json.loads(block.text)), self._said


def _empty_tables() -> None:
    """Empty the application's tables, if a page creates them for a trial."""
    for family in BUILT_IN:
        for model in family.MODELS.values():
            model.truncate_table(cascade=True)


def _shape(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _shape(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_shape(each) for each in value[:1]]
    # `None` or a value: a reason may be either.
    return "number" if isinstance(value, int | float) and not isinstance(value, bool) else type(value).__name__


def _form(line: str) -> str:
    """Return a line without its variable parts: numbers, dates before a time, units of time, widths of columns."""
    line = re.sub(r"0-0-0 (?=0)", "", re.sub(r"\d[\d,.:]*", "0", line))
    return re.sub(r"\s+", " ", re.sub(r"\b0 (ms|s|min|h|d)\b", "0 s", line)).strip()
