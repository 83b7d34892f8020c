"""Table of the constants in the code, with the reason that their comments give."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import housekeeping
from docs.generators.tables import code, table

_PACKAGE: Final = Path(housekeeping.__file__).parent
#: Packages whose numbers are mostly about display.
_WITHOUT: Final = ("cli", "demo", "embedded", "presentation", "testing", "web")
_SECONDS: Final = {
    "microseconds": 1e-6,
    "milliseconds": 1e-3,
    "seconds": 1,
    "minutes": 60,
    "hours": 3600,
    "days": 86400,
}
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
    for node in ast.parse(text).body:
        if not (isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value):
            continue
        value = _value(node.target.id, node.value)
        reason = _comment(lines, node)
        if value is not None and reason:
            yield value, code(node.target.id), code(module), reason


def _value(name: str, node: ast.expr) -> str | None:
    if isinstance(node, ast.Call) and ast.unparse(node.func) == "timedelta":
        seconds = sum(_SECONDS.get(word.arg or "", 0) * float(ast.literal_eval(word.value)) for word in node.keywords)
        return _duration(seconds)
    try:
        number = eval(compile(ast.Expression(node), "", "eval"), {"__builtins__": {}})
    except (NameError, TypeError, AttributeError):
        return None
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
