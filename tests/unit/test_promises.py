from __future__ import annotations

import re
import runpy
from collections import Counter
from pathlib import Path

from tests.twins.registry import all_twins

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/explanation/promises.md").read_text(encoding="utf-8")

#: As semantics.md numbers the promises, and the scenarios after them.
NUMBERS = [
    f"{letter}{number}"
    for letter, last in (("D", 10), ("L", 6), ("I", 4), ("R", 6), ("S", 5), ("B", 3), ("F", 10))
    for number in range(1, last + 1)
]


def test_every_promise_and_scenario_has_a_row_with_a_test_and_a_broken_twin() -> None:
    rows = {cells[1].strip(): cells for line in PAGE.splitlines() if len(cells := line.split("|")) == 7}

    assert [number for number in NUMBERS if number not in rows] == []
    assert [number for number in NUMBERS if "`test_" not in rows[number][3]] == []
    assert [number for number in NUMBERS if "`" not in rows[number][4]] == []


def test_the_page_names_the_twins_that_there_are() -> None:
    written = runpy.run_path(str(ROOT / "docs/promises.py"))["page"](PAGE)

    assert written == PAGE, "run: PYTHONPATH=. python docs/promises.py"


def test_every_twin_breaks_a_promise_and_has_a_name_of_its_own() -> None:
    names = Counter(twin.name for twin in all_twins())

    assert [name for name, number in names.items() if number > 1 and len(_promises_of(name)) > 1] == []
    assert [str(twin) for twin in all_twins() if twin.promise not in NUMBERS] == []


def test_every_twin_names_a_test_that_there_is() -> None:
    missing = []
    for twin in all_twins():
        file, _, name = twin.test.partition("::")
        if not re.search(rf"^def {re.escape(name)}\(", (ROOT / file).read_text(encoding="utf-8"), re.MULTILINE):
            missing.append(str(twin))

    assert missing == []


def _promises_of(name: str) -> set[str]:
    return {twin.promise for twin in all_twins() if twin.name == name}
