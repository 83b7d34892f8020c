"""Tests of facts in the documentation against the code."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

import housekeeping
from housekeeping.core.settings import PREFIX, Settings, WorkerSettings
from housekeeping.workers import BUILT_IN

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs").rglob("*.md"))
TESTS = {
    name
    for path in (ROOT / "tests").rglob("*.py")
    for name in re.findall(r"^ *def (test_\w+)", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_test_named_in_a_page_exists(page: Path) -> None:
    named = set(re.findall(r"`(test_\w+)`", page.read_text(encoding="utf-8")))

    assert named - TESTS == set()


def test_every_setting_is_documented() -> None:
    text = (ROOT / "docs/reference/settings.md").read_text(encoding="utf-8")
    names = [f"{PREFIX}{'SCHEMA' if field == 'schema_name' else field.upper()}" for field in Settings.model_fields]

    assert [name for name in names if f"`{name}`" not in text] == []
    assert [key for key in WorkerSettings.model_fields if f"`{key}`" not in text] == []


@pytest.mark.parametrize(
    "sweep", [sweep for family in BUILT_IN for sweep in family.SWEEPS], ids=lambda sweep: sweep.name
)
def test_every_worker_is_documented(sweep: object) -> None:
    name: str = getattr(sweep, "name")  # noqa: B009
    pages = "".join(page.read_text(encoding="utf-8") for page in (ROOT / "docs").rglob("*.md"))

    assert name in pages


def test_changelog_starts_with_this_version() -> None:
    headings = re.findall(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), flags=re.MULTILINE)

    assert headings[0] == housekeeping.__version__


def test_no_page_names_a_folder_of_a_machine() -> None:
    texts = {page: page.read_text(encoding="utf-8") for page in [*PAGES, ROOT / "README.md", ROOT / "CHANGELOG.md"]}

    assert [str(page) for page, text in texts.items() if re.search(r"/root/|/work/|/home/", text)] == []


def test_page_of_state_machines_is_up_to_date() -> None:
    page = runpy.run_path(str(ROOT / "docs/state_machines.py"))["page"]

    assert (ROOT / "docs/explanation/state-machines.md").read_text(encoding="utf-8") == page(), (
        "run: python docs/state_machines.py"
    )
