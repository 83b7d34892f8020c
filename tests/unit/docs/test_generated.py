"""Tests that the generated parts of the reference, and the figures of the README, are up to date."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from docs import generate
from docs.generators.tables import cells
from tests.unit.docs.blocks import ROOT

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


def test_figures_of_the_readme_are_those_of_the_benchmarks() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    _, _, part = readme.partition("\n## How fast it is\n")
    part, _, _ = part.partition("\n## ")
    measured = (ROOT / "docs/explanation/benchmarks.md").read_text(encoding="utf-8")

    rows = [
        [cell.strip() for cell in row.strip("| ").split("|")] for row in re.findall(r"^\| .*\d.*$", part, re.MULTILINE)
    ]
    in_table = [(rate, longest.removesuffix(" ms")) for _, rate, longest in rows]
    # The page's tables begin with the contestant and its rate, and end with the longest transaction.
    lines = measured.splitlines()
    unknown = [
        row for row in in_table if not any(f"| {row[0]} |" in line and line.endswith(f"| {row[1]} |") for line in lines)
    ]
    assert len(in_table) == 4
    assert unknown == []
    in_text = re.findall(r"\d+\.\d+ ms", part)
    assert in_text
    assert [each for each in in_text if f"| {each.removesuffix(' ms')} |" not in measured] == []
