"""Tests that the generated parts of the reference are up to date."""

from __future__ import annotations

from pathlib import Path

import pytest

from docs import generate
from docs.generators.tables import cells

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
