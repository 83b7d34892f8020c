"""Table of the constants in the code, with the reason that their comments give."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import housekeeping
from docs.generators.tables import code, table

_PACKAGE: Final = Path(housekeeping.__file__).parent
#: Packages whose numbers are mostly about display.
_WITHOUT: Final = ("cli", "demo", "embedded", "testing", "web")
_UNITS: Final = ((86400, "d"), (3600, "h"), (60, "min"))


def numbers(old: str) -> str:
    """Return the table of every constant that has a number and a comment."""
    rows = [
        row
        for path in sorted(_PACKAGE.rglob("*.py"))
        if path.relative_to(_PACKAGE).parts[0] not in _WITHOUT
        for row in _constants(path)
    ]
    return table(("Value", "Constant", "Module", "Reason"), rows, old)


def _constants(path: Path) -> Iterator[tuple[str, str, str, str]]:
    text = path.read_text(encoding="utf-8")
    lines = text.splitlines()
    module = path.relative_to(_PACKAGE.parent).as_posix()
    known: dict[str, Any] = {"__builtins__": {}, "timedelta": timedelta}
    for node in ast.parse(text).body:
        if not (isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value):
            continue
        value = _value(node.target.id, node.value, known)
        reason = _comment(lines, node)
        if value is not None and reason:
            yield value, code(node.target.id), code(module), reason


def _value(name: str, node: ast.expr, known: dict[str, Any]) -> str | None:
    """Return a constant's value as text, and add it to the `known` ones, which later constants may use."""
    try:
        number = known[name] = eval(compile(ast.Expression(node), "", "eval"), known)
    except (NameError, TypeError, AttributeError):
        return None
    if isinstance(number, timedelta):
        return _duration(number.total_seconds())
    if isinstance(number, bool) or not isinstance(number, int | float):
        return None
    if name.endswith("_MS"):
        return _duration(number / 1000)
    return _duration(number) if name.endswith("_S") else f"{number:,}"


def _duration(seconds: float) -> str:
    for size, unit in _UNITS:
        if seconds >= size and seconds % size == 0:
            return f"{seconds:,.0f} s ({seconds / size:g} {unit})"
    return f"{seconds:g} s"


def _comment(lines: list[str], node: ast.AnnAssign) -> str:
    """Return the comment behind the constant or above it."""
    last = lines[(node.end_lineno or node.lineno) - 1]
    behind = last[node.end_col_offset or 0 :].strip() if node.end_col_offset is not None else ""
    if behind.startswith("#"):
        return _text([behind])
    above: list[str] = []
    for line in reversed(lines[: node.lineno - 1]):
        if not line.startswith("#"):
            break
        above.insert(0, line)
    return _text(above)


def _text(comment: list[str]) -> str:
    joined = " ".join(line.lstrip("#: ").strip() for line in comment)
    return re.sub(r"([|<_*])", r"\\\1", joined.replace("`", ""))
