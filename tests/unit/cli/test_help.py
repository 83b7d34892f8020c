"""Help texts of all commands."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

import click
import pytest
from click.testing import CliRunner

from tests.internals.cli import LazyCommand, main


def commands(group: click.Group, *path: str) -> Iterator[tuple[str, ...]]:
    """Yield the words of each command and group."""
    yield path
    for name in group.list_commands(click.Context(group)):
        found = group.get_command(click.Context(group), name)
        command = found.load() if isinstance(found, LazyCommand) else found
        if isinstance(command, click.Group):
            yield from commands(command, *path, name)
        else:
            yield (*path, name)


#: Commands that change the application, the library's tables or the servers.
CHANGING = [
    ("init",),
    ("run",),
    ("purge",),
    ("enqueue",),
    ("pause",),
    ("narrow",),
    ("resume",),
    ("stop",),
    ("restore",),
    ("leases", "release"),
    ("dedup", "release"),
    ("deadletters", "requeue"),
    ("deadletters", "delete"),
    ("acknowledge",),
    ("erase",),
    ("uninstall",),
]
#: Commands that only read -> arguments that each of them needs.
READING: Final[dict[tuple[str, ...], list[str]]] = {
    ("actions",): [],
    ("coverage",): [],
    ("deadletters", "list"): [],
    ("deadletters", "show"): ["unknown"],
    ("dedup", "list"): [],
    ("doctor",): [],
    ("erasures",): [],
    ("errors",): [],
    ("export",): ["person", "1"],
    ("leases", "list"): [],
    ("list",): [],
    ("plan",): ["housekeeping.old_runs"],
    ("receipt",): ["1"],
    ("runs",): [],
    ("status",): [],
    ("why",): ["housekeeping.old_runs"],
}
#: Commands that work until they are stopped.
SERVING = [("demo",), ("scheduler",), ("serve",), ("web",), ("worker",)]


def test_every_command_is_known_to_change_read_or_serve() -> None:
    found = set(commands(main))

    assert found - {words[:-1] for words in found if words} == {*CHANGING, *READING, *SERVING}


@pytest.mark.parametrize("words", list(commands(main)), ids=" ".join)
def test_help_fits_80_columns(words: tuple[str, ...]) -> None:
    shown = CliRunner().invoke(main, [*words, "--help"], terminal_width=80).output

    assert shown.startswith("Usage: ")
    assert [line for line in shown.splitlines() if len(line) > 80] == []
    assert re.findall(r"--[a-z-]*-$", shown, re.MULTILINE) == []  # click breaks lines at hyphens


@pytest.mark.parametrize("words", CHANGING, ids=" ".join)
def test_command_that_changes_something_prints_json(words: tuple[str, ...]) -> None:
    shown = CliRunner().invoke(main, [*words, "--help"], terminal_width=80).output

    assert "  --json " in shown
