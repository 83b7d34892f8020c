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
    **{name: getattr(housekeeping, name) for name in housekeeping.__all__},
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
        "import housekeeping.ledger.runs",
        "from housekeeping.ledger import runs as ledger",
        "from housekeeping.ledger.runs import advance",
        "def late():\n    from housekeeping.engine.batches import Batches",
        "from housekeeping.database import connection as db",
    ],
)
def test_import_of_a_private_name_is_detected(source: str) -> None:
    assert len(list(_not_public(source))) == 1


#: Modules whose names users import, besides `housekeeping` itself.
_PUBLIC_MODULES: Final = re.compile(
    r"housekeeping\.(app|recipes|testing(\.\w+)?|workers\.\w+\.models|workers\.object_storage(\.pending_uploads)?)"
)
#: They are about the modules themselves, are what a type checker sees of a user's code, or run where tests cannot be
#: imported.
_ABOUT_MODULES: Final = ("tests/internals/", "tests/typing/", "tests/acceptance/quick_")


@pytest.mark.parametrize("folder", sorted(path.name for path in (_ROOT / "tests").iterdir() if path.is_dir()))
def test_tests_import_internals_from_one_place_only(folder: str) -> None:
    found = []
    for path in sorted((_ROOT / "tests" / folder).rglob("*.py")):
        name = path.relative_to(_ROOT).as_posix()
        if name.startswith(_ABOUT_MODULES):
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            module = node.module or "" if isinstance(node, ast.ImportFrom) else ""
            if module.startswith("housekeeping.") and not _PUBLIC_MODULES.fullmatch(module):
                found.append(f"{name}:{node.lineno} {module}; import it from tests.internals")  # type: ignore[attr-defined]

    assert found == []


@pytest.mark.parametrize("family", _FAMILIES)
def test_families_import_only_public_names(family: str) -> None:
    own = f"housekeeping.workers.{family}"
    found = []
    for path in (_WORKERS / family).rglob("*.py"):
        nodes = ast.walk(ast.parse(path.read_text("utf-8")))
        modules = [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)]
        found += [each for each in modules if each.startswith("housekeeping.") and not each.startswith(own)]

    assert found == []


@pytest.mark.parametrize("name", sorted(set(housekeeping.__all__) - {"__version__", "events", "testing"}))
def test_every_public_name_is_documented(name: str) -> None:
    pages = "".join((_ROOT / "docs/reference" / page).read_text("utf-8") for page in ("sweeps.md", "public-names.md"))
    value = getattr(housekeeping, name)

    assert re.search(rf"`(housekeeping\.)?{name}[`(]", pages)
    # Other objects are described on the page only.
    assert inspect.getdoc(value) or not callable(value)


def test_type_checkers_see_the_same_public_names() -> None:
    source = (_ROOT / "housekeeping/__init__.py").read_text(encoding="utf-8")
    imports = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ImportFrom) and node.level == 0]
    checked = {each.asname: f"{node.module}.{each.name}" for node in imports for each in node.names if each.asname}
    # Declared by its type: an import under another name is not exported.
    checked["current_database"] = "housekeeping.database.connection.database"

    assert sorted(checked) == sorted(set(housekeeping.__all__) - {"__version__"})
    for name, home in checked.items():
        module, _, attribute = home.rpartition(".")
        assert getattr(housekeeping, name) is getattr(importlib.import_module(module), attribute)
