"""Examples of docs/howto/testing.md, run by a separate pytest process in an empty folder."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path
from typing import Final

import pytest

from tests.integration.testing.conftest import RunPytest

#: Starts many processes.
pytestmark = pytest.mark.slow

_TOP: Final = Path(__file__).parents[3]
_BLOCKS: Final = re.compile(r"^```(python|text)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def blocks() -> dict[str, str]:
    """Return the code blocks of the page by purpose."""
    found = [text for _, text in _BLOCKS.findall((_TOP / "docs/howto/testing.md").read_text(encoding="utf-8"))]
    return dict(zip(("sweep", "tests", "counted", "failure", "outside", "broker"), found, strict=True))


def test_examples_of_the_page_pass(run_pytest: RunPytest, blocks: dict[str, str]) -> None:
    tests = "\n".join((blocks["tests"], blocks["outside"], blocks["broker"]))

    status, said = run_pytest({"expired.py": blocks["sweep"], "test_expired.py": tests})

    assert status == 0 and "5 passed" in said, said


def test_failure_has_the_text_of_the_page(run_pytest: RunPytest, blocks: dict[str, str]) -> None:
    tests = blocks["tests"].replace(
        "from expired import Session, sweep", "from expired import Session\nfrom counted import sweep"
    )
    files = {"expired.py": blocks["sweep"], "counted.py": blocks["counted"], "test_expired.py": tests}

    status, said = run_pytest(files | {"pytest.ini": "[pytest]\naddopts = -k idempotent\n"})

    shown = textwrap.dedent("\n".join(line[1:] for line in said.splitlines() if line.startswith("E ")))
    assert status == 1 and shown.strip() == blocks["failure"].strip(), said
