"""Tests that the generated parts of the reference are up to date."""

from __future__ import annotations

from pathlib import Path

import pytest

from docs import generate
from docs.generators.tables import ByHand, cells, table

PAGES = generate.pages()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_generated_page_is_up_to_date(page: Path) -> None:
    text = page.read_text(encoding="utf-8")

    assert text == generate.page(text), "run: python -m docs.generate"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_generated_row_has_its_handwritten_cell(page: Path) -> None:
    parts = generate.parts(page.read_text(encoding="utf-8"))

    # Check the last column only: other cells may be empty, such as the fields of a log line.
    assert [row[0] for part in parts.values() for row in cells(part) if not row[-1]] == []


def test_every_generated_part_has_one_page() -> None:
    placed = [name for page in PAGES for name in generate.parts(page.read_text(encoding="utf-8"))]

    assert sorted(placed) == sorted(generate.PARTS)


def test_handwritten_cell_stays_with_its_row() -> None:
    old = "| Name | Kind | For |\n|---|---|---|\n| `a` | old | what a is for |\n| `gone` | old | nobody |"

    new = table(("Name", "Kind", "For"), [("`b`", "new", ByHand()), ("`a`", "new", ByHand())], old)

    assert cells(new) == [["`b`", "new", ""], ["`a`", "new", "what a is for"]]
