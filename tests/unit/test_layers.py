from __future__ import annotations

import ast
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

import housekeeping

_ROOT: Final = Path(housekeeping.__file__).parent
#: Packages and root modules in a total order: each imports only from those before it, also in its functions and for
#: type checking.
_ORDER: Final = (
    "core",
    "database",
    "brokers",
    "ledger",
    "leases",
    "middleware",
    "sweeps",
    "engine",
    "workers",
    "recipes",
    "erasures",
    "insight",
    "doctor",
    "app",
    "serve",
    "web",
    "cli",
    "__main__",
)
#: They may import everything, and nothing imports them.
_BESIDE: Final = ("testing", "embedded", "demo", "contrib")
#: Module of each public name.
_HOMES: Final = {name: [home] for name, home in {**housekeeping._PUBLIC, **housekeeping._MODULES}.items()}


def _modules() -> list[str]:
    files = (path.relative_to(_ROOT.parent).with_suffix("") for path in _ROOT.rglob("*.py"))
    return sorted(".".join(path.parts).removesuffix(".__init__") for path in files)


def _place(module: str) -> int | None:
    """Return the place of a module's package in the order; None if it has none."""
    package = module.split(".")[1]
    return len(_ORDER) if package in _BESIDE else _ORDER.index(package) if package in _ORDER else None


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
            for name in node.names:
                yield from _HOMES.get(name.name, [f"housekeeping.{name.name}"])
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("housekeeping."):
            yield str(node.module)


def _faults(module: str, source: str) -> Iterator[str]:
    for target in _imported(module, source):
        if target == ".":
            yield f"{module} has a relative import"
        elif (theirs := _place(target)) is None or (ours := _place(module)) is None:
            yield f"{module} or {target} has no place in the order"
        elif theirs > ours:
            yield f"{module} imports {target}, which comes after it"
        elif ".workers." in module and ".workers." in target and module.split(".")[2] != target.split(".")[2]:
            yield f"{module} imports another worker, {target}"


def _source(module: str) -> str:
    path = _ROOT.parent.joinpath(*module.split("."))
    return (path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text()


def _graph() -> dict[str, set[str]]:
    """Return the modules that each module imports anywhere, also in functions and for type checking."""
    modules, graph = set(_modules()) - {"housekeeping"}, {}
    for module in modules:
        found = set[str]()
        for node in ast.walk(ast.parse(_source(module))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("housekeeping"):
                names = {f"{node.module}.{each.name}" for each in node.names}
                found |= names & modules or {str(node.module)}
        graph[module] = found & modules - {module}
    return graph


def test_no_modules_import_each_other_in_a_circle() -> None:
    graph = _graph()
    while ends := {module for module, imported in graph.items() if not imported & graph.keys()}:
        graph = {module: imported for module, imported in graph.items() if module not in ends}

    assert sorted(graph) == []


def test_every_module_has_a_place_in_the_order() -> None:
    assert [module for module in _modules() if module != "housekeeping" and _place(module) is None] == []


@pytest.mark.parametrize("module", [module for module in _modules() if module != "housekeeping"])
def test_imports_go_down_the_order_of_packages(module: str) -> None:
    assert list(_faults(module, _source(module))) == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("housekeeping.database.connection", "from housekeeping.engine import run"),
        ("housekeeping.engine.run", "def late():\n    import housekeeping.workers"),
        (
            "housekeeping.engine.run",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import housekeeping.app",
        ),
        ("housekeeping.brokers.redis", "from housekeeping import cli"),
        ("housekeeping.engine.run", "from housekeeping.embedded import servers"),
        ("housekeeping.engine.run", "from .walk import Executor"),
        ("housekeeping.engine.run", "from . import walk"),
        ("housekeeping.workers.a.worker", "from housekeeping.workers.b.models import B"),
        ("housekeeping.engine.run", "from housekeeping.unheard_of import x"),
        ("housekeeping.engine.run", "import housekeeping\nhousekeeping.install(broker)"),
        ("housekeeping.web.snapshot", "from housekeeping.testing import ManualClock"),
        ("housekeeping.core.clock", "from housekeeping.database.connection import database"),
    ],
)
def test_forbidden_import_is_detected(module: str, source: str) -> None:
    assert len(list(_faults(module, source))) == 1


def test_middleware_alone_imports_neither_engine_nor_sweeps_nor_workers() -> None:
    program = "import sys, housekeeping.middleware; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
    packages = Counter(name.split(".")[1] for name in loaded if name.startswith("housekeeping."))

    assert set(packages) <= {"core", "database", "brokers", "ledger", "leases", "middleware"}
    assert packages.total() <= 50
