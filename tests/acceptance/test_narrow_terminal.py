"""Output of the commands on a terminal of 80 columns."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final

import pytest

from tests.acceptance.conftest import Command

#: Starts many processes.
pytestmark = pytest.mark.slow

WORKER: Final = "ci.stuck_builds.drop_scheduled"
STATUSES: Final = "user_status_cleanup.batch"
COMMANDS: Final = (
    *("list", "status", f"status {STATUSES}", "runs", "runs --outcome done", "runs 1", "actions", "doctor"),
    *(f"why {STATUSES}", f"why {WORKER}", f"plan {STATUSES}", f"run {STATUSES} --dry-run"),
    *("deadletters list", "leases list", "dedup list"),
)


def too_wide(text: str) -> list[str]:
    """Return the lines over 80 columns, unless they are a single word."""
    return [line for line in text.splitlines() if len(line) > 80 and len(line.split()) > 1]


@pytest.fixture
def busy(command: Command, add: Callable[[int], None], environment: dict[str, str]) -> None:
    """An installation with runs, alerts, a paused worker, a held key and a long reason."""
    add(2000)
    command("init", "--with-tables")
    command("run", STATUSES)
    add(10_001)
    command("pause", WORKER, "--reason", "a migration of the table " * 5, "--until", "2h")
    command("run", WORKER)
    command("enqueue", STATUSES)
    environment["COLUMNS"] = "80"


def test_output_fits_80_columns(command: Command, busy: None) -> None:
    shown = {words: command(*words.split()) for words in COMMANDS}

    assert {words: each.stderr for words, each in shown.items() if each.returncode not in (0, 1)} == {}
    assert [words for words, each in shown.items() if not each.stdout] == []
    assert {words: wide for words, each in shown.items() if (wide := too_wide(each.stdout))} == {}
    for each in (shown["list"].stdout, shown["status"].stdout):
        assert WORKER in each.split() and re.search(rf"^{re.escape(STATUSES)}$", each, re.MULTILINE)
