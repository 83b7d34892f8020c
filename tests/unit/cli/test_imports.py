"""Tests of what the command line imports, because imports are most of the time of a short command."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Final

import pytest

#: Clients of servers, and other libraries that only some commands need.
_CLIENTS: Final = {
    *("redis", "dramatiq", "periodiq", "pendulum", "obstore", "prometheus_client", "structlog", "pika", "asyncio"),
    *("dotenv", "playhouse"),
}
#: Chapters that run sweeps, inspect the installation or show it, which a list of declarations does not need.
_OTHER_CHAPTERS: Final = (
    *(f"housekeeping.{package}" for package in ("brokers", "leases", "middleware", "doctor", "web", "testing", "demo")),
    *(f"housekeeping.engine.{each}" for each in ("run", "batches", "commit", "failures", "gates", "guard", "speed")),
    *(f"housekeeping.insight.{each}" for each in ("plan", "status", "why", "trends")),
    "housekeeping.ledger.history",
    *(f"housekeeping.sweeps.{each}" for each in ("cascade", "dependents", "tree", "validate_tables")),
    "housekeeping.cli.sample_rows",
)
#: With a module of Python 3.15 about missing parts of the standard library, which its list of modules leaves out.
_EVERY_COMMAND: Final = {"housekeeping", "click", "_missing_stdlib_info"}
#: peewee imports psycopg 3 if it is installed, which the library does not require.
_PROGRAM: Final = """
import atexit, sys
sys.modules["psycopg"] = None
before = set(sys.modules)
from housekeeping.cli.main import main
atexit.register(lambda: print(*set(sys.modules) - before, file=sys.stderr))
main()
"""


def imported_by(folder: Path, *arguments: str) -> set[str]:
    """Return the names of the modules that a command imported, run without settings in an empty folder."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HOUSEKEEPING_")}
    finished = subprocess.run(
        [sys.executable, "-c", _PROGRAM, *arguments],
        env=environment | {"PYTHONPATH": str(Path(__file__).parents[3])},
        cwd=folder,
        capture_output=True,
        text=True,
    )
    assert finished.returncode == 0, finished.stderr
    return set(finished.stderr.split())


def lines_of(module: str) -> int:
    """Return the length of a module."""
    spec = find_spec(module)
    assert spec is not None and spec.origin is not None
    return len(Path(spec.origin).read_text(encoding="utf-8").splitlines())


@pytest.mark.parametrize("arguments", [("--help",), ("--version",), ("-h",)])
def test_help_and_version_import_only_click(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    imported = imported_by(tmp_path, *arguments)

    others = {name.split(".")[0] for name in imported} - _EVERY_COMMAND - set(sys.stdlib_module_names)
    assert others == set()
    assert len(imported) < 120


@pytest.mark.parametrize("arguments", [("list",), ("list", "--json")])
def test_list_imports_no_clients_of_servers(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    imported = imported_by(tmp_path, *arguments)

    assert {name.split(".")[0] for name in imported} & _CLIENTS == set()
    assert sorted(name for name in imported if name.startswith(_OTHER_CHAPTERS)) == []
    assert len(imported) < 340
    assert sum(map(lines_of, (name for name in imported if name.startswith("housekeeping")))) < 20_000


def test_command_is_imported_when_it_is_used(tmp_path: Path) -> None:
    imported = imported_by(tmp_path, "run", "--help")

    assert "housekeeping.cli.run" in imported
    assert "housekeeping.cli.install" not in imported
