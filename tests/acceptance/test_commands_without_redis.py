"""Each command in an installation without Redis: it works, or one line names what it needs."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Final

import click
import pytest

from tests.acceptance.conftest import Command
from tests.internals.cli import LazyCommand, main

STATUSES: Final = "user_status_cleanup.batch"
#: Command -> arguments with which it does its work.
WORKS: Final[dict[str, list[str]]] = {
    "acknowledge": ["no_worker"],
    "actions": [],
    "coverage": [],
    "doctor": [],
    "erasures": [],
    "errors": [],
    "init": [],
    "leases list": [],
    "list": [],
    "narrow": [STATUSES, "--batch-size", "10"],
    "pause": [STATUSES],
    "plan": [STATUSES],
    "purge": ["user_statuses", "--where", "user_id < 2", "--yes"],
    "resume": [STATUSES],
    "run": [STATUSES],
    "runs": ["1"],
    "status": [],
    "stop": ["1"],
    "uninstall": ["--dry-run"],
    "why": [STATUSES],
}
#: Command -> arguments, and what it lacks, which is not Redis.
REFUSES: Final[dict[str, tuple[list[str], str]]] = {
    "erase": (["person", "1"], "HOUSEKEEPING_ERASURE_KEY is not set"),
    "export": (["person", "1"], "HOUSEKEEPING_ERASURE_KEY is not set"),
    "leases release": (["unknown"], "no lease 'unknown' is held"),
    "receipt": (["1"], "there is no erasure '1'"),
    "restore": (["1"], "has no archive"),
}
#: Command that needs messages -> arguments.
NEEDS_MESSAGES: Final[dict[str, list[str]]] = {
    "deadletters list": [],
    "deadletters show": ["unknown"],
    "deadletters requeue": ["unknown"],
    "deadletters delete": ["unknown"],
    "dedup list": [],
    "dedup release": ["unknown"],
    "enqueue": [STATUSES],
    "scheduler": [],
    "worker": [],
}
#: Commands that work until they are stopped; ``demo`` has servers of its own.
SERVING: Final = {"demo", "serve", "web"}


pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("without_redis")]


@pytest.fixture
def ran(add: Callable[[int], None], command: Command) -> None:
    """A worker has had a run, and an alert is active."""
    add(3)
    assert command("run", STATUSES).returncode == 0
    assert command("status").returncode == 0


def names(group: click.Group, *path: str) -> Iterator[str]:
    for name in group.list_commands(click.Context(group)):
        found = group.get_command(click.Context(group), name)
        command = found.load() if isinstance(found, LazyCommand) else found
        yield from names(command, *path, name) if isinstance(command, click.Group) else [" ".join((*path, name))]


def test_every_command_is_known() -> None:
    assert set(names(main)) == {*WORKS, *REFUSES, *NEEDS_MESSAGES, *SERVING}


@pytest.mark.parametrize("name", WORKS)
def test_command_works(name: str, ran: None, command: Command) -> None:
    done = command(*name.split(), *WORKS[name])

    assert done.returncode in (0, 3), done.stdout + done.stderr  # 3: doctor finds no process
    assert not re.search(r"Traceback|in Redis, which|Redis (keys|did not)", done.stdout)


@pytest.mark.parametrize("name", REFUSES)
def test_command_lacks_something_else(name: str, ran: None, command: Command) -> None:
    arguments, text = REFUSES[name]

    refused = command(*name.split(), *arguments)

    assert (refused.returncode, refused.stdout, refused.stderr.count("\n")) == (2, "", 1)
    assert text in refused.stderr


@pytest.mark.parametrize("name", NEEDS_MESSAGES)
def test_command_that_needs_messages_fails_with_one_line(name: str, command: Command) -> None:
    refused = command(*name.split(), *NEEDS_MESSAGES[name])

    assert (refused.returncode, refused.stdout, refused.stderr.count("\n")) == (2, "", 1)
    assert refused.stderr.startswith("housekeeping: HOUSEKEEPING_REDIS_URL is not set; ")
    assert refused.stderr.endswith("; without Redis (housekeeping serve) there are no messages\n")
