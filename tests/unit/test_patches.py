"""Tests that no test patches a private name of the library, which would pin how the library does something."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

_TESTS: Final = Path(__file__).parents[1]
#: Folders whose faults are planted in the library itself.
_PLANTED: Final = ("twins", "chaos", "simulator")
#: Private names that may be patched, with the reason.
_ALLOWED: Final = {
    "integration/middleware/interrupts/test_statements.py: statement._connection": (
        "no PostgreSQL refuses the connection for a cancel request when a test wants it"
    ),
    "unit/middleware/test_dramatiq_internals.py: broker._should_do_maintenance": "it is Dramatiq's",
}
#: Names of the library and of others; ``_meta`` is peewee's.
_PRIVATE: Final = re.compile(r"_(?!_|meta$)")
#: What a file with such a patch contains.
_SUSPECT: Final = re.compile(r"setattr\(|at_step\(|patch|\._\w+( =|: )|\._\w+\.\w+ =")


@pytest.fixture(scope="module")
def texts() -> dict[str, str]:
    """The code of the tests by file, without the folders of planted faults."""
    paths = [path for path in _TESTS.rglob("*.py") if path.relative_to(_TESTS).parts[0] not in _PLANTED]
    return {str(path.relative_to(_TESTS)): path.read_text(encoding="utf-8") for path in paths}


def _patched(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Yield owner and name of what is replaced: by a call, or by an assignment to another object's attribute."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called in ("setattr", "object", "at_step") and len(node.args) > 1:
                name = node.args[1]
                if isinstance(name, ast.Constant) and isinstance(name.value, str):
                    yield ast.unparse(node.args[0]), name.value
            if called in ("setattr", "patch") and node.args and isinstance(node.args[0], ast.Constant):
                owner, _, name_of = str(node.args[0].value).rpartition(".")
                yield owner, name_of
        elif isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign):
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                if isinstance(target, ast.Attribute) and ast.unparse(target.value).split(".")[0] not in ("self", "cls"):
                    yield ast.unparse(target.value), target.attr


def _of_others(tree: ast.Module) -> set[str]:
    """Return the names that a file imports from other projects."""
    imported = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    return {
        each.asname or each.name.partition(".")[0]
        for node in imported
        for each in node.names
        if not (node.module or "" if isinstance(node, ast.ImportFrom) else each.name).startswith("housekeeping")
    }


def _private(source: str) -> list[str]:
    """Return the private names of the library that a file patches."""
    if _SUSPECT.search(source) is None:
        return []  # most files, which need not be parsed
    tree = ast.parse(source)
    others = _of_others(tree)
    return [
        f"{owner}.{name}"
        for owner, name in _patched(tree)
        if any(_PRIVATE.match(part) for part in (*owner.split("."), name)) and owner.partition(".")[0] not in others
    ]


def test_no_private_name_of_the_library_is_patched(texts: dict[str, str]) -> None:
    found = {f"{path}: {name}" for path, text in texts.items() for name in _private(text)}

    assert sorted(found - set(_ALLOWED)) == []
    assert sorted(set(_ALLOWED) - found) == [], "no longer needed"


@pytest.mark.parametrize(
    "line",
    [
        'monkeypatch.setattr(store, "_move", breaks)',
        'monkeypatch.setattr("housekeeping.web.snapshot._FRESH_S", 0)',
        'patch.setattr(application._positions, "current", older)',
        'with at_step(Admission, "_ask", "before", lose): ...',
        'mock.patch("housekeeping.web.snapshot._FRESH_S")',
        'mock.patch.object(store, "_move")',
        'setattr(store, "_move", breaks)',
        "store._move = breaks",
        "lease._renewal.lost = True",
    ],
)
def test_patch_of_a_private_name_is_detected(line: str) -> None:
    assert len(_private(f"from housekeeping.leases import renewal as store\n{line}")) == 1
