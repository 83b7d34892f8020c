"""What one's own sweeps are written with: public, documented, and enough for the built-in ones."""

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
#: The five; the sixth cleans the library's own tables.
_FAMILIES: Final = (
    "batched_git_ref_updates",
    "bulk_imports",
    "ci_stuck_builds",
    "object_storage",
    "user_status_cleanup",
)
_FILES: Final = [path for family in _FAMILIES for path in sorted((_WORKERS / family).rglob("*.py"))]
#: Public objects by their public name, events among them.
_PUBLIC: Final[dict[str, Any]] = {
    **{name: getattr(module, name) for module in (housekeeping, sweeps) for name in module.__all__},
    **{name: value for name, value in vars(housekeeping.events).items() if isinstance(value, NamedSignal)},
}


def _not_public(source: str) -> Iterator[str]:
    """What a worker's module imports of the package that no public module has; its own neighbours do not count."""
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
def test_the_built_in_workers_use_nothing_that_is_not_public(path: Path) -> None:
    assert list(_not_public(path.read_text(encoding="utf-8"))) == []


@pytest.mark.parametrize(
    "source",
    [
        "import housekeeping.sweeps.ledger.runs",
        "from housekeeping.sweeps.ledger import runs as ledger",
        "from housekeeping.sweeps.ledger.runs import begin",
        "def late():\n    from housekeeping.sweeps.engine.executor import Executor",
        "from housekeeping.database import connection as db",
    ],
)
def test_an_import_of_something_that_is_not_public_is_found(source: str) -> None:
    assert len(list(_not_public(source))) == 1


@pytest.mark.parametrize("family", _FAMILIES)
def test_a_declaration_takes_what_it_is_written_with_from_the_one_public_module(family: str) -> None:
    source = (_WORKERS / family / "worker.py").read_text(encoding="utf-8")
    modules = {node.module for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ImportFrom)}
    engine = {module for module in modules if (module or "").startswith("housekeeping.sweeps")}

    assert engine == {"housekeeping.sweeps"}


@pytest.mark.parametrize("name", sweeps.__all__)
def test_every_public_name_stands_in_the_reference_and_says_what_it_is(name: str) -> None:
    page = (_ROOT / "docs/reference/sweeps.md").read_text(encoding="utf-8")
    value = getattr(sweeps, name)

    assert re.search(rf"`{name}[`(]", page)
    # What is no class and no function is described on the page alone.
    assert inspect.getdoc(value) or not callable(value)


def test_the_names_of_the_package_are_the_same_for_people_and_for_type_checkers() -> None:
    source = (_ROOT / "housekeeping/__init__.py").read_text(encoding="utf-8")
    imports = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ImportFrom) and node.level == 0]
    checked = {each.asname: f"{node.module}.{each.name}" for node in imports for each in node.names if each.asname}

    assert sorted(checked) == sorted(set(housekeeping.__all__) - {"__version__"})
    for name, home in checked.items():
        module, _, attribute = home.rpartition(".")
        assert getattr(housekeeping, name) is getattr(importlib.import_module(module), attribute)


def test_the_most_used_names_are_in_the_package_as_well() -> None:
    both = set(housekeeping.__all__) & set(sweeps.__all__)

    assert {"Sweep", "Delete", "Transition", "Call", "BaseModel", "UtcDateTimeField"} < both
    assert [name for name in both if getattr(housekeeping, name) is not getattr(sweeps, name)] == []


def test_the_first_page_shows_a_whole_module_of_ten_lines_at_most() -> None:
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
