from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

import housekeeping

_ROOT: Final = Path(housekeeping.__file__).parent
_LAYERS: Final = {
    "core": 0,
    "database": 0,
    "leases": 0,
    "sweeps": 1,
    "middleware": 1,
    "brokers": 1,
    "embedded": 1,
    "workers": 2,
    "presentation": 2,
    "app": 3,
    "installation": 3,
    "doctor": 3,
    "purge": 3,
    "recipes": 2,
    "web": 3,
    "demo": 4,
    "cli": 4,
    "__main__": 5,
    # Used by users' tests. It may import everything, and nothing imports it.
    "testing": 5,
}
#: Module of each public name.
_HOMES: Final = {name: [home] for name, home in {**housekeeping._PUBLIC, **housekeeping._MODULES}.items()}


def _modules() -> list[str]:
    files = (path.relative_to(_ROOT.parent).with_suffix("") for path in _ROOT.rglob("*.py"))
    return sorted(".".join(path.parts).removesuffix(".__init__") for path in files)


def _layer(module: str) -> int | None:
    return _LAYERS.get(module.split(".")[1])


def _imported(module: str, source: str) -> Iterator[str]:
    """Yield the modules of the package that a module imports anywhere. Relative imports are ``.``."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "housekeeping":
            # Public name that the package imports lazily.
            yield from _HOMES.get(node.attr, ())
        elif isinstance(node, ast.Import):
            yield from (name.name for name in node.names if name.name.startswith("housekeeping."))
        elif isinstance(node, ast.ImportFrom) and node.level:
            yield "."
        elif isinstance(node, ast.ImportFrom) and node.module == "housekeeping":
            yield from (f"housekeeping.{name.name}" for name in node.names)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("housekeeping."):
            yield str(node.module)


def _faults(module: str, source: str) -> Iterator[str]:
    for target in _imported(module, source):
        if target == ".":
            yield f"{module} has a relative import"
        elif (theirs := _layer(target)) is None or (ours := _layer(module)) is None:
            yield f"{module} or {target} has no layer"
        elif theirs > ours:
            yield f"{module} (layer {ours}) imports {target} (layer {theirs})"
        elif ".workers." in module and ".workers." in target and module.split(".")[2] != target.split(".")[2]:
            yield f"{module} imports another worker, {target}"


def _source(module: str) -> str:
    path = _ROOT.parent.joinpath(*module.split("."))
    return (path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text()


def test_every_module_has_a_layer() -> None:
    assert [module for module in _modules() if module != "housekeeping" and _layer(module) is None] == []


@pytest.mark.parametrize("module", [module for module in _modules() if module != "housekeeping"])
def test_imports_go_to_a_lower_or_the_same_layer(module: str) -> None:
    assert list(_faults(module, _source(module))) == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("housekeeping.database.connection", "from housekeeping.sweeps.engine import runner as run"),
        ("housekeeping.sweeps.engine.runner", "def late():\n    import housekeeping.workers"),
        (
            "housekeeping.sweeps.engine.runner",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import housekeeping.app",
        ),
        ("housekeeping.brokers.queues", "from housekeeping import cli"),
        ("housekeeping.sweeps.engine.runner", "from .walk import Executor"),
        ("housekeeping.sweeps.engine.runner", "from . import walk"),
        ("housekeeping.workers.a.worker", "from housekeeping.workers.b.models import B"),
        ("housekeeping.sweeps.engine.runner", "from housekeeping.unheard_of import x"),
        ("housekeeping.sweeps.engine.runner", "import housekeeping\nhousekeeping.install(broker)"),
        ("housekeeping.web.snapshot", "from housekeeping.testing import ManualClock"),
    ],
)
def test_forbidden_import_is_detected(module: str, source: str) -> None:
    assert len(list(_faults(module, source))) == 1
