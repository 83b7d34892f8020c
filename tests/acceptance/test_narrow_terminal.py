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


@pytest.mark.parametrize(
    "words",
    [
        ("list",),
        ("status",),
        ("status", STATUSES),
        ("runs",),
        ("runs", "--outcome", "done"),
        ("actions",),
        ("runs", "1"),
        ("why", STATUSES),
        ("why", WORKER),
        ("plan", STATUSES),
        ("run", STATUSES, "--dry-run"),
        ("deadletters", "list"),
        ("leases", "list"),
        ("dedup", "list"),
        ("doctor",),
    ],
    ids=" ".join,
)
def test_output_fits_80_columns(command: Command, busy: None, words: tuple[str, ...]) -> None:
    shown = command(*words)

    assert shown.stdout != "" and shown.returncode in (0, 1), shown.stderr
    assert too_wide(shown.stdout) == []


def test_list_and_status_name_each_worker_in_full(command: Command, busy: None) -> None:
    for words in (("list",), ("status",)):
        shown = command(*words).stdout

        assert WORKER in shown.split() and re.search(rf"^{re.escape(STATUSES)}$", shown, re.MULTILINE)
