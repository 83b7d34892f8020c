"""Tests of facts in the documentation against the code."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

from tests.internals.insight import REASONS
from tests.internals.workers import BUILT_IN

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


@pytest.mark.parametrize(
    "sweep", [sweep for family in BUILT_IN for sweep in family.SWEEPS], ids=lambda sweep: sweep.name
)
def test_every_worker_is_documented(sweep: object) -> None:
    name: str = getattr(sweep, "name")  # noqa: B009
    pages = "".join(page.read_text(encoding="utf-8") for page in (ROOT / "docs").rglob("*.md"))

    assert name in pages


def test_why_page_has_every_reason_for_which_a_tick_starts_no_run() -> None:
    page = (ROOT / "docs/howto/why-did-it-not-run.md").read_text(encoding="utf-8")

    rows = re.findall(r"^\| `(?:skipped|missed)`, ([\w, ]+) \|", page, flags=re.MULTILINE)

    of_runs = {"out_of_time", "limit", "shutdown", "stopped", "taken_over", "lease_lost", "gate", "breaker", "clock"}
    assert {reason for row in rows for reason in row.split(", ")} == REASONS.keys() - of_runs


def test_page_of_state_machines_is_up_to_date() -> None:
    page = runpy.run_path(str(ROOT / "docs/state_machines.py"))["page"]

    assert (ROOT / "docs/explanation/state-machines.md").read_text(encoding="utf-8") == page(), (
        "run: python docs/state_machines.py"
    )
