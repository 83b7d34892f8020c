"""Tests that the public API is documented and sufficient for the built-in workers."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
from blinker import NamedSignal

import housekeeping
from housekeeping import sweeps

_ROOT: Final = Path(__file__).parents[2]
_WORKERS: Final = _ROOT / "housekeeping/workers"
#: Families without the ones of the library's own tables.
_FAMILIES: Final = (
    "batched_git_ref_updates",
    "bulk_imports",
    "ci_stuck_builds",
    "object_storage",
    "user_status_cleanup",
)
_FILES: Final = [path for family in _FAMILIES for path in sorted((_WORKERS / family).rglob("*.py"))]
#: Public objects by name, including events.
_PUBLIC: Final[dict[str, Any]] = {
    **{name: getattr(module, name) for module in (housekeeping, sweeps) for name in module.__all__},
    **{name: value for name, value in vars(housekeeping.events).items() if isinstance(value, NamedSignal)},
}


def _not_public(source: str) -> Iterator[str]:
    """Yield imports of a worker's module that are not public, except from its own package."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (each.name for each in node.names if each.name.startswith("housekeeping."))
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "housekeeping":
            assert node.module is not None
            if node.module.startswith("housekeeping.workers."):
                continue
            for each in node.names:
                imported = getattr(importlib.import_module(node.module), each.name)
                if each.name not in _PUBLIC or imported is not _PUBLIC[each.name]:
                    yield f"{node.module}.{each.name}"


@pytest.mark.parametrize("path", _FILES, ids=lambda path: str(path.relative_to(_WORKERS)))
def test_built_in_workers_use_only_public_names(path: Path) -> None:
    assert list(_not_public(path.read_text(encoding="utf-8"))) == []


@pytest.mark.parametrize(
    "source",
    [
        "import housekeeping.sweeps.ledger.runs",
        "from housekeeping.sweeps.ledger import runs as ledger",
        "from housekeeping.sweeps.ledger.runs import advance",
        "def late():\n    from housekeeping.sweeps.engine.executor import Executor",
        "from housekeeping.database import connection as db",
    ],
)
def test_import_of_a_private_name_is_detected(source: str) -> None:
    assert len(list(_not_public(source))) == 1


@pytest.mark.parametrize("family", _FAMILIES)
def test_declarations_import_from_housekeeping_sweeps_only(family: str) -> None:
    source = (_WORKERS / family / "worker.py").read_text(encoding="utf-8")
    modules = {node.module for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ImportFrom)}
    engine = {module for module in modules if (module or "").startswith("housekeeping.sweeps")}

    assert engine == {"housekeeping.sweeps"}


@pytest.mark.parametrize("name", sweeps.__all__)
def test_every_public_name_is_documented(name: str) -> None:
    page = (_ROOT / "docs/reference/sweeps.md").read_text(encoding="utf-8")
    value = getattr(sweeps, name)

    assert re.search(rf"`{name}[`(]", page)
    # Other objects are described on the page only.
    assert inspect.getdoc(value) or not callable(value)


def test_type_checkers_see_the_same_public_names() -> None:
    source = (_ROOT / "housekeeping/__init__.py").read_text(encoding="utf-8")
    imports = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ImportFrom) and node.level == 0]
    checked = {each.asname: f"{node.module}.{each.name}" for node in imports for each in node.names if each.asname}

    assert sorted(checked) == sorted(set(housekeeping.__all__) - {"__version__"})
    for name, home in checked.items():
        module, _, attribute = home.rpartition(".")
        assert getattr(housekeeping, name) is getattr(importlib.import_module(module), attribute)


def test_most_used_names_are_in_the_package() -> None:
    both = set(housekeeping.__all__) & set(sweeps.__all__)

    assert {"Sweep", "Delete", "Transition", "Call", "BaseModel", "UtcDateTimeField"} < both
    assert [name for name in both if getattr(housekeeping, name) is not getattr(sweeps, name)] == []


def test_own_sweep_page_shows_ten_lines_at_most() -> None:
    page = (_ROOT / "docs/howto/own-sweep.md").read_text(encoding="utf-8")
    block = re.search(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)

    assert block is not None
    tree = ast.parse(block[1])
    statements = [node for node in tree.body if not isinstance(node, ast.Import | ast.ImportFrom)]
    lines = {
        line
        for node in statements
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
        if block[1].splitlines()[line - 1].strip()
    }
    assert 0 < len(lines) <= 10
