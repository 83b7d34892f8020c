"""The parts of the reference that are made from the code, held against the code."""

from __future__ import annotations

from pathlib import Path

import pytest

from docs import generate
from docs.generators.tables import ByHand, cells, table

PAGES = generate.pages()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_says_what_the_code_says(page: Path) -> None:
    text = page.read_text(encoding="utf-8")

    assert text == generate.page(text), "run: python -m docs.generate"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_no_row_is_without_what_is_written_by_hand(page: Path) -> None:
    parts = generate.parts(page.read_text(encoding="utf-8"))

    # In the last column: other cells may be empty, such as the fields of a log line without any.
    assert [row[0] for part in parts.values() for row in cells(part) if not row[-1]] == []


def test_every_part_has_its_place_in_a_page() -> None:
    placed = [name for page in PAGES for name in generate.parts(page.read_text(encoding="utf-8"))]

    assert sorted(placed) == sorted(generate.PARTS)


def test_what_is_written_by_hand_stays_with_its_row() -> None:
    old = "| Name | Kind | For |\n|---|---|---|\n| `a` | old | what a is for |\n| `gone` | old | nobody |"

    new = table(("Name", "Kind", "For"), [("`b`", "new", ByHand()), ("`a`", "new", ByHand())], old)

    assert cells(new) == [["`b`", "new", ""], ["`a`", "new", "what a is for"]]
