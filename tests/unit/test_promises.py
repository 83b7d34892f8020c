from __future__ import annotations

import ast
import re
from collections import Counter
from pathlib import Path
from typing import Final

from docs.generators.promise_tests import titles
from tests.twins import Twin
from tests.twins.registry import all_twins

ROOT = Path(__file__).parents[2]
#: Folders of tests that need an option or a command of their own.
_LEFT_OUT: Final = ("tests/chaos/", "tests/simulator/", "tests/soak/")

#: Numbers of the promises and of the scenarios after them.
NUMBERS = [
    f"{letter}{number}"
    for letter, last in dict(D=10, L=6, I=4, R=6, S=5, B=3, F=10, A=2, C=2, E=3, P=1, O=1).items()
    for number in range(1, last + 1)
]


def test_every_promise_has_a_section() -> None:
    assert sorted(titles()) == sorted(NUMBERS)


def test_every_promise_has_a_broken_twin() -> None:
    assert set(NUMBERS) - {twin.promise for twin in all_twins()} == set()


def test_every_twin_breaks_a_promise_and_has_a_unique_name() -> None:
    names = Counter(twin.name for twin in all_twins())

    assert [name for name, number in names.items() if number > 1 and len(_promises_of(name)) > 1] == []
    assert [str(twin) for twin in all_twins() if twin.promise not in NUMBERS] == []


def test_every_twin_names_an_existing_test() -> None:
    missing = []
    for twin in all_twins():
        file, _, name = twin.test.partition("::")
        if not re.search(rf"^def {re.escape(name)}\(", (ROOT / file).read_text(encoding="utf-8"), re.MULTILINE):
            missing.append(str(twin))

    assert missing == []


def test_every_promise_has_a_quick_test() -> None:
    quick = {twin.promise for twin in all_twins() if _is_quick(twin)}

    assert set(NUMBERS) - quick == set()


def _is_quick(twin: Twin) -> bool:
    """Return whether a run without options includes the test."""
    file, _, name = twin.test.partition("::")
    if file.startswith(_LEFT_OUT):
        return False
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    marks = [ast.unparse(node.value) for node in tree.body if isinstance(node, ast.Assign)]
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name == name:
            marks += map(ast.unparse, node.decorator_list)
    return not any("pytest.mark.slow" in mark for mark in marks)


def _promises_of(name: str) -> set[str]:
    return {twin.promise for twin in all_twins() if twin.name == name}
