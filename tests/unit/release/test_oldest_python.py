from __future__ import annotations

from pathlib import Path

from tests.oldest_python import Package, faults, interpreters


def _python(folder: Path, name: str, script: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    program = folder / name
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    return program


def test_interpreters_on_the_path_and_in_pyenv_are_found(tmp_path: Path) -> None:
    on_path = _python(tmp_path / "bin", "python3.12", "echo 3.12.3")
    _python(tmp_path / "pyenv/shims", "python3.11", "exit 127")
    in_pyenv = _python(tmp_path / "pyenv/versions/3.11.1/bin", "python3.11", "echo 3.11.1")
    _python(tmp_path / "bin", "python3.9", "echo 3.9.18")

    found = list(interpreters(f"{tmp_path}/bin:{tmp_path}/pyenv/shims:{tmp_path}/missing"))

    assert {each for each in found if tmp_path in each[1].parents} == {((3, 12, 3), on_path), ((3, 11, 1), in_pyenv)}


def test_pin_that_needs_a_later_patch_release_is_reported() -> None:
    packages = [
        Package("soupsieve", "4.1.2", ">=3.11.5"),
        Package("furo", "2025.12.19", ">=3.8"),
        Package("x", "1", ""),
    ]

    found = list(faults(packages, ["soupsieve", "furo", "x"], ["3.11.0", "3.12.0"]))

    assert found == ["soupsieve 4.1.2 needs Python >=3.11.5, not 3.11.0"]


def test_package_without_a_pin_is_reported() -> None:
    packages = [Package("Typing_Extensions", "4.16.0", ""), Package("new", "1", "")]

    assert list(faults(packages, ["typing-extensions"], [])) == ["new 1 is not in constraints.txt"]
