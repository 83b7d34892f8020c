from __future__ import annotations

from pathlib import Path
from typing import Final

import pytest

from tests import structure

_MODULE: Final = '''"""A module."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Record:
    number: int


class Plain:
    @property
    def one(self) -> int:
        return 1

    async def two(self) -> int:
        def inner() -> int:
            return 2

        return inner()
'''


@pytest.fixture
def package(tmp_path: Path) -> Path:
    (tmp_path / "core" / "inner").mkdir(parents=True)
    (tmp_path / "__init__.py").write_text('"""A package."""\n')
    (tmp_path / "core" / "inner" / "records.py").write_text(_MODULE)
    (tmp_path / "core" / "script.lua").write_text("local one = 1\n\nreturn one\n")
    (tmp_path / "core" / "page.html").write_text("<p>\n" * 100)
    return tmp_path


def test_static_figures_of_a_package_are_right(package: Path) -> None:
    figures = structure.static(package)

    assert figures == structure.Static(
        lines=24,
        files=3,
        median_file=3,
        longest_file=20,
        longest_file_name="core/inner/records.py",
        classes=2,
        dataclasses=1,
        functions=3,
        mean_function=3.0,
        packages=(structure.Package("__init__.py", 1, 1), structure.Package("core", 2, 23)),
    )
