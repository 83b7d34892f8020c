"""Code blocks of the README and of docs/ that no other test runs, page by page from top to bottom."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import pytest
from psycopg2 import sql

from tests.installation import Installation
from tests.installation import installation as installation
from tests.installation import redis_of_installations as redis_of_installations
from tests.internals.workers import BUILT_IN
from tests.unit.docs.blocks import PAGES, RUN, Block, blocks, name_of, run_elsewhere

#: Placeholders for a reader's own servers.
_DATABASE: Final = re.compile(r"postgresql://user:password@host:5432/\w+")
_REDIS: Final = re.compile(r"redis://host:6379/\d")
#: .ci/run and tests/acceptance/test_demo.py run the installation, the demo and the suites from an empty folder.
_DONE_ELSEWHERE: Final = re.compile(
    r"^(?:python3 -m venv|\S*pip (?:install|wheel)|\S*housekeeping demo|pytest|HOUSEKEEPING_TEST_)(?:.*\\\n)*.*$",
    re.MULTILINE,
)
#: Programs that run until they are stopped: stopped as soon as they work.
_GOES_ON: Final = re.compile(r"^((?:housekeeping (?:worker|scheduler|web)|dramatiq|periodiq)\b)", re.MULTILINE)
#: It may warn of the small servers of the tests.
_DOCTOR: Final = re.compile(r"^(housekeeping doctor)$", re.MULTILINE)
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


def _own(page: Path) -> list[Block]:
    return [
        block
        for block in blocks(page)
        # Tests of their own run the files of docs/examples as applications.
        if block.kind in (*RUN, "text") and not block.mark.startswith(("<!-- command", "<!-- file"))
    ]


def _cases() -> list[Any]:
    found = []
    for page in PAGES:
        kinds = {block.kind for block in _own(page)} & set(RUN)
        if kinds and run_elsewhere(name_of(page)) is None:
            marks = [pytest.mark.slow] if kinds & {"sh", "python"} else []
            found.append(pytest.param(page, id=name_of(page), marks=marks))
    return found


class _Reader:
    """Reader who follows a page in one shell."""

    def __init__(self, installation: Installation, folder: Path) -> None:
        self._installation = installation
        self._folder = folder
        self._environment = dict(installation.environment)
        self._said = ""
        self._python = ""
        self._last = ""
        folder.mkdir()

    def do(self, block: Block) -> None:
        {"sh": self._shell, "python": self._execute, "sql": self._query, "json": self._compare, "text": self._show}[
            block.kind
        ](block)
        self._last = block.kind

    def _with_own_servers(self, text: str) -> str:
        text = _DATABASE.sub(lambda found: self._installation.environment["HOUSEKEEPING_DATABASE_URL"], text)
        return _REDIS.sub(lambda found: self._installation.environment["HOUSEKEEPING_REDIS_URL"], text)

    def _shell(self, block: Block) -> None:
        text = _GOES_ON.sub(r"serve \1", _DONE_ELSEWHERE.sub("", self._with_own_servers(block.text)))
        text = _DOCTOR.sub(r"\1 || [ $? -eq 3 ]", text)
        if "--with-sample-data" in text:
            empty_tables()
        kept = self._folder / "environment"
        # Exported variables hold for the next blocks; every setting must exist.
        check = f"{sys.executable} -c 'from housekeeping.core.settings import Settings; Settings.load()'"
        ended = self._run(["bash", "-euo", "pipefail", "-c", f"{_SERVE}{text}\n{check}\nenv -0 > {kept}"], block)
        self._environment = dict(one.split("=", 1) for one in kept.read_text().split("\0") if "=" in one)
        self._said = ended.stdout

    def _execute(self, block: Block) -> None:
        # Imports and variables of earlier blocks on the page are available.
        self._python += f"{self._with_own_servers(block.text)}\n"
        self._run([sys.executable, "-W", "error", "-c", self._python], block)

    def _run(self, command: list[str], block: Block) -> subprocess.CompletedProcess[str]:
        ended = subprocess.run(
            command,
            env=self._environment,
            cwd=self._folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert ended.returncode == 0, f"{block.place}\n{block.text}\n{ended.stdout}\n{ended.stderr}"
        return ended

    def _query(self, block: Block) -> None:
        own = self._installation.settings.schema_name
        text = re.sub(r"\bhousekeeping\.", f"{own}.", block.text)
        text = re.sub(r"SCHEMA housekeeping\b", f"SCHEMA {own}", text)
        text = re.sub(r"(TO|ROLE) housekeeping\b", rf"\1 reader_{os.getpid()}", text)
        with self._installation.admin.cursor() as cursor:
            cursor.execute(text)

    def _compare(self, block: Block) -> None:
        assert _shape(json.loads(self._said)) == _shape(json.loads(block.text)), self._said

    def _show(self, block: Block) -> None:
        """Assert that the command right before printed every line; a block after no command is a picture."""
        if self._last == "sh":
            came = [_form(line) for line in self._said.splitlines()]
            assert [line for line in map(_form, block.text.splitlines()) if line not in came] == [], self._said


def empty_tables() -> None:
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
    """Return a line without its variable parts: numbers, units of time, widths of columns."""
    line = re.sub(r"\d[\d,.:]*", "0", line)
    return re.sub(r"\s+", " ", re.sub(r"\b0 (ms|s|min|h|d)\b", "0 s", line)).strip()


@pytest.mark.parametrize("page", _cases())
def test_every_block_of_a_page_has_the_described_effect(installation: Installation, tmp_path: Path, page: Path) -> None:
    reader = _Reader(installation, tmp_path / "reader")
    admin = installation.admin
    with admin.cursor() as cursor:
        # Each page starts with the same tables; a page's own changes are rolled back.
        cursor.execute(
            sql.SQL("BEGIN; SET LOCAL search_path TO {}").format(sql.Identifier(installation.settings.namespace))
        )
    try:
        for block in _own(page):
            reader.do(block)
    finally:
        with admin.cursor() as cursor:
            cursor.execute("ROLLBACK")
