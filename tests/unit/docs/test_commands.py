"""Tests that every command in the documentation exists with its options."""

from __future__ import annotations

import configparser
import re
import shlex
from importlib.util import find_spec
from pathlib import Path
from typing import Final

import click
import pytest

from tests.internals.cli import LazyCommand, main
from tests.unit.docs.blocks import PAGES, ROOT, blocks, name_of, words_in_code

#: Characters around optional arguments.
_BRACKETS: Final = str.maketrans("", "", "[]…")
_ENVIRONMENT: Final = re.compile(r"tox -e (\S+)")
#: Commands of CONTRIBUTING.md that .ci/run does not run word for word.
_BY_HAND: Final = {
    "python3 -m venv .venv && .venv/bin/pip install -q -c constraints.txt -e '.[dev]'",
    ".venv/bin/pytest -q -n 2 --dist loadfile tests/unit",
    ".venv/bin/pytest -q -n 2 --dist loadfile tests/integration/leases",
    ".venv/bin/pytest -q -n 2 --dist loadfile --twins tests/integration/middleware/deduplication",
    ".venv/bin/ruff format . && .venv/bin/ruff check .",
    ".venv/bin/python -m docs.generate",
}


def unknown_in(words: list[str]) -> str | None:
    """Return the unknown part of a ``housekeeping`` command, or None."""
    command: click.Command = main
    given = [word for word in words[1:] if word not in ("--debug", "--help", "OPTIONS")]
    while isinstance(command, click.Group) and given and not given[0].startswith("-"):
        name = given.pop(0)
        if name not in command.commands and name != "COMMAND":
            return f"no command {name}"
        command = command.commands.get(name, command)
        command = command.load() if isinstance(command, LazyCommand) else command
        if name == "COMMAND":
            return None
    try:
        command.make_parser(click.Context(command)).parse_args(given)
    except click.UsageError as error:
        return error.format_message()
    return None


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_housekeeping_command_exists_with_its_options(page: Path) -> None:
    lines = [line for block in blocks(page) for line in block.text.replace("\\\n", " ").split("\n")]
    said = [*lines, *words_in_code(page)]

    commands = [_words(text) for text in said if text.startswith("housekeeping ")]
    assert [(words, unknown) for words in commands if (unknown := unknown_in(words))] == []


def _alternatives(name: str) -> set[str]:
    """Return the environments of a section, such as py311-oldest and py312-oldest of ``py3{11,12}-oldest``."""
    group = re.search(r"\{(.+?)\}", name)
    if group is None:
        return {name}
    return {each for one in group[1].split(",") for each in _alternatives(name.replace(group[0], one, 1))}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_named_environment_path_and_module_exists(page: Path) -> None:
    said = [*(block.text for block in blocks(page)), *words_in_code(page)]
    tox = configparser.ConfigParser(interpolation=None)
    tox.read(ROOT / "tox.ini")

    environments = {name for text in said for names in _ENVIRONMENT.findall(text) for name in names.split(",")}
    known = {each for name in tox.sections() for each in _alternatives(name.removeprefix("testenv:"))}
    assert environments <= known | set(tox["tox"]["env_list"].split(", "))
    paths = {path for text in said for path in re.findall(r"\b(?:tests|docs|housekeeping)/[\w/.*-]+[\w*]", text)}
    assert [path for path in paths if not any(ROOT.glob(path))] == []
    modules = {name for text in said for name in re.findall(r"python -m ([\w.]+)", text)}
    assert [name for name in modules if find_spec(name) is None] == []


def test_contributing_names_only_known_commands() -> None:
    run = (ROOT / ".ci/run").read_text(encoding="utf-8").replace("$work/html", "build/html")

    lines = [line for block in blocks(ROOT / "CONTRIBUTING.md") for line in block.text.splitlines()]
    assert {line for line in lines if line not in run} == _BY_HAND


def test_simulator_has_the_options_of_its_page() -> None:
    page = ROOT / "docs/explanation/simulator.md"
    told = (ROOT / "tests/simulator/__main__.py").read_text(encoding="utf-8")  # its import replaces the clock

    named = {option for block in blocks(page) for option in re.findall(r" (--[a-z-]+)", block.text)}
    assert named and named - set(re.findall(r"--[a-z-]+", told)) == set()


def _words(text: str) -> list[str]:
    return shlex.split(text.translate(_BRACKETS), comments=True)
