"""Table of promises with the tests and broken twins that check each one."""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path
from typing import Final

from docs.generators.tables import ByHand, code, table
from tests.twins.registry import all_twins

_PROMISES: Final = Path(__file__).parents[1] / "explanation" / "promises.md"
_HEADING: Final = re.compile(r"^### ([A-Z]\d+): (.+)$", re.MULTILINE)


def titles() -> dict[str, str]:
    """Return the title of each promise by its number."""
    return dict(_HEADING.findall(_PROMISES.read_text(encoding="utf-8")))


def promise_tests(old: str) -> str:
    """Return the table. Tests without a twin are written by hand."""
    rows = [(number, title, ByHand("-"), _tests_with_twins(number)) for number, title in titles().items()]
    return table(("", "Promise", "Tests without a twin", "Tests with their broken twins"), rows, old)


def _tests_with_twins(number: str) -> str:
    twins: dict[str, set[str]] = defaultdict(set)
    for twin in all_twins():
        if twin.promise == number:
            twins[twin.test.partition("::")[2]].add(twin.name)
    return "; ".join(f"{code(test)}: {', '.join(map(code, sorted(names)))}" for test, names in sorted(twins.items()))
