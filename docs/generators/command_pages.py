"""Reference of the commands: usage, help and options from click."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator

import click

from docs.generators.tables import code, table
from housekeeping.cli.main import LazyCommand, main


def commands(old: str) -> str:
    """Return a section per command, in the order of `housekeeping --help`."""
    found = all_commands(main, "housekeeping")
    return "\n\n".join(section for path, command in found for section in _section(path, command))


def all_commands(command: click.Command, path: str) -> Iterator[tuple[str, click.Command]]:
    """Yield a command and those below it, each with the words that call it."""
    command = command.load() if isinstance(command, LazyCommand) else command
    yield path, command
    if isinstance(command, click.Group):
        for name, each in command.commands.items():
            yield from all_commands(each, f"{path} {name}")


def _section(path: str, command: click.Command) -> Iterator[str]:
    words = " ".join(map(_argument, (one for one in command.params if isinstance(one, click.Argument))))
    yield f"### `{path}`"
    context = click.Context(command, info_name=path)
    given = [one for one in command.params if isinstance(one, click.Option)]
    usage = [path, *(["[OPTIONS]"] if given else []), *([words] if words else [])]
    yield code(" ".join(usage) if not isinstance(command, click.Group) else f"{path} [OPTIONS] COMMAND")
    yield _help(command)
    if given:
        records = filter(None, (option.get_help_record(context) for option in given))
        yield table(("Option", "Effect"), [(code(names), _text(text)) for names, text in records], "")


def _argument(argument: click.Argument) -> str:
    name = argument.metavar or (argument.name or "").upper()
    if argument.nargs == -1:
        name = f"{name.rstrip('.')}..." if not name.endswith("...") else name
    return name if argument.required or name.startswith("[") else f"[{name}]"


def _help(command: click.Command) -> str:
    """Return the help as Markdown. Preformatted paragraphs become blocks."""
    paragraphs = inspect.cleandoc(command.help or "").split("\n\n")
    return "\n\n".join(
        "```text\n" + paragraph.replace("\b\n", "") + "\n```" if paragraph.startswith("\b") else _text(paragraph)
        for paragraph in paragraphs
    )


def _text(paragraph: str) -> str:
    """Return plain text with Markdown's special characters escaped."""
    joined = " ".join(line.strip() for line in paragraph.splitlines())
    parts = re.split(r"(`[^`]+`)", joined)
    return "".join(part if part.startswith("`") else re.sub(r"([*_<\[|])", r"\\\1", part) for part in parts)
