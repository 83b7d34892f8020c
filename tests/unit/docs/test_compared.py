"""Tests that each row of the comparison with other tools names its tests.

`tests/unit/test_documentation.py` checks that these exist.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

import pytest

from tests.unit.docs.blocks import ROOT

_PAGE: Final = ROOT / "docs" / "explanation" / "compared.md"
_TEST: Final = re.compile(r"`(test_\w+)`")
#: The words with which the column *Here* begins, and whether the row needs a test.
_VERDICTS: Final = {"Same": True, "More": True, "Otherwise": True, "Left out": False}
#: All options of pt-archiver 3.2.1.
_PT_ARCHIVER: Final = """
analyze ascend-first ask-pass buffer bulk-delete [no]bulk-delete-limit bulk-insert channel charset [no]check-charset
[no]check-columns check-interval check-slave-lag columns commit-each config database delayed-insert dest dry-run file
for-update header help high-priority-select host ignore limit local low-priority-delete low-priority-insert max-flow-ctl
max-lag no-ascend no-delete optimize output-format password pid plugin port primary-key-only progress purge quick-delete
quiet replace retries run-time [no]safe-auto-increment sentinel slave-user slave-password set-vars share-lock
skip-foreign-key-checks sleep sleep-coef socket source statistics stop txn-size user version [no]version-check where
why-quit
""".split()


def rows() -> Iterator[tuple[str, str, str]]:
    """Yield first cell, verdict and tests of each row that has tests."""
    header: list[str] = []
    for line in _PAGE.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")] if line.startswith("|") else []
        if not cells:
            header = []
        elif not header:
            header = cells
        elif header[-1] == "Tests" and cells[-1] and not set(cells[0]) <= {"-"}:
            yield cells[0], cells[header.index("Here")], cells[-1]


@pytest.mark.parametrize(("feature", "here", "tests"), list(rows()))
def test_each_row_of_the_comparison_names_its_tests(feature: str, here: str, tests: str) -> None:
    verdict = re.match(r"\*\*(.+?)\*\*", here)
    assert verdict is not None and verdict[1] in _VERDICTS, f"{feature}: {here}"
    assert _TEST.search(tests) or not _VERDICTS[verdict[1]], f"{feature} names no test"


def test_comparison_has_every_option_of_pt_archiver() -> None:
    assert {f"`--{option}`" for option in _PT_ARCHIVER} <= {feature for feature, *_ in rows()}
