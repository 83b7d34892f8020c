"""Each command in an installation without Redis: it works, or one line names what it needs."""

from __future__ import annotations

import re
import subprocess
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


def test_each_command_that_needs_no_messages_works(ran: None, command: Command) -> None:
    done = {name: command(*name.split(), *arguments) for name, arguments in WORKS.items()}

    # 3: doctor finds no process
    assert {name: each.stderr for name, each in done.items() if each.returncode not in (0, 3)} == {}
    about_redis = re.compile("Traceback|in Redis, which|Redis (keys|did not)")
    assert {name: each.stdout for name, each in done.items() if about_redis.search(each.stdout)} == {}


def test_command_lacks_something_else(ran: None, command: Command) -> None:
    refused = {name: command(*name.split(), *arguments) for name, (arguments, _) in REFUSES.items()}

    assert {name: one_line_of(each).partition(REFUSES[name][1])[1] for name, each in refused.items()} == {
        name: text for name, (_, text) in REFUSES.items()
    }


def test_command_that_needs_messages_fails_with_one_line(command: Command) -> None:
    refused = {name: command(*name.split(), *arguments) for name, arguments in NEEDS_MESSAGES.items()}

    line = re.compile(
        r"housekeeping: HOUSEKEEPING_REDIS_URL is not set; .*"
        r"; without Redis \(housekeeping serve\) there are no messages"
    )
    assert {name: each.stderr for name, each in refused.items() if not line.fullmatch(one_line_of(each))} == {}


def one_line_of(refused: subprocess.CompletedProcess[str]) -> str:
    """Return the line of a refused command; empty unless it prints only that and exits with 2."""
    is_refused = (refused.returncode, refused.stdout, refused.stderr.count("\n")) == (2, "", 1)
    return refused.stderr.strip() if is_refused else ""
