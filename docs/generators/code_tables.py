"""Tables of metrics, errors, events, actor options, public names and tox environments."""

from __future__ import annotations

import configparser
import importlib
import inspect
import re
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from types import GenericAlias, ModuleType
from typing import Any, Final

import redis

import housekeeping
from docs.generators.tables import ByHand, code, table
from housekeeping.core import errors, events, telemetry
from housekeeping.core.settings import Settings
from housekeeping.middleware import standard_middleware

_PACKAGE: Final = Path(housekeeping.__file__).parent
#: Declaration of an event with the comment that lists its columns.
_EVENT: Final = re.compile(r"^#: rows: (.+)\n(\w+): Final", re.MULTILINE)
#: Internal options.
_NOT_FOR_USERS: Final = {"metrics", "periodic", "sweep"}


def metric_table(old: str) -> str:
    """Return the table of metrics. Descriptions may be extended in the page."""
    rows = [
        (code(each.name), each.kind.lower(), ", ".join(map(code, each.labels)), ByHand(each.text))
        for each in telemetry.ALL
    ]
    return table(("Metric", "Kind", "Labels", "What it is"), rows, old)


def error_table(old: str) -> str:
    """Return the table of errors, subclasses after their base."""
    rows = [
        (code(each.__name__), code(each.__bases__[0].__name__), str(each.exit_code), _first_line(each))
        for each in _errors(errors.HousekeepingError)
    ]
    return table(("Error", "Is a", "Exit status", "It means"), rows, old)


def event_table(old: str) -> str:
    """Return the table of events. Their senders are written by hand."""
    found = _EVENT.findall(Path(events.__file__).read_text(encoding="utf-8"))
    rows = [(code(name), ", ".join(map(code, rows.split(", "))), ByHand()) for rows, name in found]
    return table(("Event", "Each row has", "Sent after a batch that"), rows, old)


def option_table(old: str) -> str:
    """Return the table of actor options."""
    ours = standard_middleware(redis.Redis(), Settings())
    options = {
        option
        for middleware in ours
        if type(middleware).__module__.startswith(f"{housekeeping.__name__}.")
        for option in middleware.actor_options
    }
    known = _dramatiqs()
    rows = [(code(name), ByHand(), ByHand()) for name in sorted(options - known - _NOT_FOR_USERS)]
    return table(("Option", "Values", "Default"), rows, old)


def name_table(old: str) -> str:
    """Return the table of the package's public names."""
    names = sorted(sorted(housekeeping.__all__), key=str.casefold)
    rows = [(code(f"housekeeping.{name}"), _what(name)) for name in names]
    return table(("Name", "What it is"), [row for row in rows if row[1]], old)


def _errors(base: type[errors.HousekeepingError]) -> Iterator[type[errors.HousekeepingError]]:
    yield base
    for each in base.__subclasses__():
        if each.__module__ == errors.__name__:
            yield from _errors(each)


def _dramatiqs() -> set[str]:
    from dramatiq.middleware import default_middleware

    return {option for middleware in default_middleware for option in middleware().actor_options}


def _what(name: str) -> str:
    value: Any = getattr(housekeeping, name)
    if name.startswith("__"):
        return "the version"
    if isinstance(value, ModuleType):
        return _first_line(importlib.import_module(value.__name__))
    # The docstring of a constant is that of its type.
    return _comment_above(name) if isinstance(value, str | timedelta | GenericAlias) else _first_line(value)


def _comment_above(name: str) -> str:
    """Return the comment above a public constant in the module that defines it."""
    source = inspect.getsource(importlib.import_module(housekeeping._PUBLIC[name]))
    found = re.search(rf"((?:^#: .*\n)+){name}\b", source, re.MULTILINE)
    assert found is not None, f"{name} has no comment"
    return " ".join(line.removeprefix("#: ") for line in found[1].splitlines())


def _first_line(value: Any) -> str:
    first = (inspect.getdoc(value) or "").split("\n\n")[0]
    return re.sub(r"``(.+?)``", r"`\1`", " ".join(first.split())).replace("|", "\\|")


def environment_table(old: str) -> str:
    """Return the table of tox environments with their descriptions."""
    tox = configparser.ConfigParser(interpolation=None)
    tox.read(_PACKAGE.parent / "tox.ini")
    first = [
        (name, tox["testenv"]["description"]) for name in tox["tox"]["env_list"].split(", ") if name.startswith("py")
    ]
    sections = [(name.removeprefix("testenv:"), tox[name]["description"]) for name in tox.sections() if ":" in name]
    others = [(re.sub(r"\{(.+?),.+?\}", r"\1", name), text) for name, text in sections]  # the first of alternatives
    rows = [(code(f"tox -e {name}"), " ".join(text.split())) for name, text in [*first, *others]]
    return table(("Command", "What it does"), rows, old)
