"""Tables of log lines and fields from the code. Their meaning is written by hand, in the page."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import housekeeping
from docs.generators.tables import ByHand, code, table

_PACKAGE: Final = Path(housekeeping.__file__).parent
_LEVELS: Final = {"debug", "info", "warning", "error", "exception"}
#: Packages without the table: workers have their own pages, embedded servers are for tests and the demo.
_ELSEWHERE: Final = ("workers", "embedded", "cli")
#: Events of log calls whose event is not a literal.
_SAID: Final[dict[str, tuple[str, ...]]] = {
    "event": ("Message cannot be enqueued yet; retrying", "Group member cannot be counted yet; retrying"),
    "otherwise": ("Could not read the ledger",),
    "trouble": ("Heartbeats cannot be sent; retrying", "Alerts cannot be evaluated; retrying"),
    "request.sweep.start_message": (),  # on the worker's page
    "self.row_log.level": (),
}
#: Levels of log calls whose level is not a literal.
_CHOSEN: Final = {"level": ("debug", "info"), "_level(actor)": ("debug", "info")}
#: Fields of dictionaries that are passed as a whole.
_TOGETHER: Final = {"spent.as_fields()": ("db_s", "redis_s")}
#: Fields of every line within a run or message.
_CONTEXT: Final = (
    *("event", "level", "timestamp", "logger"),
    *("worker", "database", "message_id", "run_id", "feature_category", "data_consistency"),
)


@dataclass
class _Line:
    levels: set[str] = field(default_factory=set)
    fields: set[str] = field(default_factory=set)


def lines(old: str) -> str:
    """Return the table of log lines."""
    rows = [
        (code(event), ", ".join(sorted(line.levels)), ", ".join(map(code, sorted(line.fields))), ByHand())
        for event, line in sorted(_lines().items(), key=lambda item: item[0].casefold())
    ]
    return table(("`event`", "Level", "Fields", "It means"), rows, old)


def fields(old: str) -> str:
    """Return the table of log fields."""
    found = {name for line in _lines().values() for name in line.fields} - set(_CONTEXT)
    rows = [(code(name), ByHand()) for name in (*_CONTEXT, *sorted(found))]
    return table(("Field", "What it is"), rows, old)


def _lines() -> dict[str, _Line]:
    found: dict[str, _Line] = defaultdict(_Line)
    for path in sorted(_PACKAGE.rglob("*.py")):
        if path.relative_to(_PACKAGE).parts[0] in _ELSEWHERE:
            continue
        for call in _calls(ast.parse(path.read_text(encoding="utf-8"))):
            said = call.args[1] if _level(call) == "log" else call.args[0]
            for event in _events(said, path):
                found[event].levels.update(_levels(call))
                found[event].fields |= set(_fields(call))
    return found


def _fields(call: ast.Call) -> Iterator[str]:
    for word in call.keywords:
        if word.arg is None:
            yield from _TOGETHER.get(ast.unparse(word.value), ())
        elif word.arg != "extra":  # the standard library's own
            yield word.arg


def _calls(module: ast.Module) -> Iterator[ast.Call]:
    for node in ast.walk(module):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args):
            continue
        if node.func.attr in _LEVELS | {"log"} and "log" in ast.unparse(node.func.value).lower():
            yield node


def _events(said: ast.expr, path: Path) -> Iterator[str]:
    # Conditional expression with two events.
    if isinstance(said, ast.IfExp):
        yield from _events(said.body, path)
        yield from _events(said.orelse, path)
    elif isinstance(said, ast.Constant):
        yield re.sub(r"%[rs]", "…", str(said.value))
    elif (text := ast.unparse(said)) in _SAID:
        yield from _SAID[text]
    else:
        raise LookupError(
            f"{path.name} logs {text}, which is no literal: say in docs/generators/log_tables.py what it is"
        )


def _levels(call: ast.Call) -> tuple[str, ...]:
    level = _level(call)
    return _CHOSEN[ast.unparse(call.args[0])] if level == "log" else (level,)


def _level(call: ast.Call) -> str:
    assert isinstance(call.func, ast.Attribute)
    return {"exception": "error"}.get(call.func.attr, call.func.attr)
