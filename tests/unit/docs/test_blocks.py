"""Tests that every code block is run, parsed or only shown."""

from __future__ import annotations

import configparser
import re
import shlex
from pathlib import Path

import pytest
import yaml

from tests.unit.docs.blocks import (
    ELSEWHERE,
    PAGES,
    READ,
    ROOT,
    RUN,
    SHOWN,
    Block,
    blocks,
    included,
    name_of,
    run_elsewhere,
)

BLOCKS = [block for page in PAGES for block in blocks(page)]


def test_every_block_has_a_known_kind() -> None:
    known = (*RUN, *READ, *SHOWN)

    # The tests in ELSEWHERE check their own blocks.
    assert [block.place for block in BLOCKS if block.kind not in known and not run_elsewhere(block.page)] == []


@pytest.mark.parametrize("pattern", ELSEWHERE)
def test_page_run_elsewhere_is_named_by_its_test(pattern: str) -> None:
    assert any(Path(name_of(page)).match(pattern) for page in PAGES), "no such page"
    text = (ROOT / ELSEWHERE[pattern]).read_text(encoding="utf-8")

    name = Path(pattern).stem.removesuffix("*")
    assert any(said in text for said in (f'"{name}"', f"{name}.md", f'"{name}-', f"{Path(pattern).name}"))


def test_every_shown_file_belongs_to_a_tested_example() -> None:
    shown = [path for page in PAGES for path in included(page)]
    paths = [path for kind in ("acceptance", "integration") for path in (ROOT / "tests" / kind).rglob("*.py")]
    tests = "".join(path.read_text(encoding="utf-8") for path in paths)

    folders = {path.relative_to(ROOT / "docs/examples").parts[0] for path in shown}
    assert [folder for folder in folders if not re.search(rf"\b{folder}\b", tests)] == []


def test_ci_runs_every_marked_block_of_the_readme() -> None:
    marks = [block.mark for block in BLOCKS if block.mark.startswith("<!-- command: ")]
    script = (ROOT / ".ci/run").read_text(encoding="utf-8")

    assert marks == ["<!-- command: demo -->", "<!-- command: tests -->"]
    assert [mark for mark in marks if f'readme_command "{mark[5:-4]}"' not in script] == []


@pytest.mark.parametrize("block", [each for each in BLOCKS if each.kind == "sh"], ids=lambda block: block.place)
def test_every_named_extra_exists(block: Block) -> None:
    asked = {
        extra for group in re.findall(r"(?:housekeeping|whl|\.)\[([\w,]+)\]", block.text) for extra in group.split(",")
    }

    setup = configparser.ConfigParser(interpolation=None)
    setup.read(ROOT / "setup.cfg")
    assert asked - set(setup["options.extras_require"]) == set()


@pytest.mark.parametrize("block", [each for each in BLOCKS if each.kind == "ini"], ids=lambda block: block.place)
def test_systemd_unit_starts_an_existing_command(block: Block) -> None:
    from tests.unit.docs.test_commands import unknown_in

    unit = configparser.ConfigParser(interpolation=None)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read_string(block.text)

    program, *arguments = shlex.split(unit["Service"]["ExecStart"])
    assert Path(program).is_absolute()
    assert unknown_in([Path(program).name, *arguments]) is None


@pytest.mark.parametrize("block", [each for each in BLOCKS if "rule_files" in each.text], ids=lambda block: block.place)
def test_prometheus_configuration_names_existing_rules_and_jobs(block: Block) -> None:
    given = yaml.safe_load(block.text)
    rules = [(ROOT / "monitoring" / name).read_text(encoding="utf-8") for name in given["rule_files"]]

    jobs = {job["job_name"] for job in given["scrape_configs"]}
    assert set(re.findall(r'job="([\w-]+)"', "".join(rules))) <= jobs
