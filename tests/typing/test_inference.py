"""Type checkers infer for users what `user_code` says, and would notice if they did not."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

pytestmark = pytest.mark.slow

ROOT: Final = Path(__file__).parents[2]
USER_CODE: Final = Path(__file__).with_name("user_code.py")
CHECKERS: Final = {
    "mypy": [sys.executable, "-m", "mypy"],
    "pyright": [sys.executable, "-m", "pyright", "--pythonpath", sys.executable],
}
#: The error that a user would see.
WRONG: Final = {
    "list[Message[str]]": "list[Message[int]]",
    'clean_up.send("1")': "clean_up.send(1)",
    "batchsize=5": "schedule=None",
    "lease.owner(), str | None": "lease.owner(), str",
}


def check(checker: str, file: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*CHECKERS[checker], str(file)], cwd=ROOT, capture_output=True, text=True, timeout=600)


@pytest.mark.parametrize("checker", CHECKERS)
def test_user_code_has_the_types_it_says(checker: str) -> None:
    done = check(checker, USER_CODE)

    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("checker", CHECKERS)
def test_each_type_that_is_another_one_is_noticed(checker: str, tmp_path: Path) -> None:
    text = USER_CODE.read_text(encoding="utf-8")
    for line, wrong in WRONG.items():
        assert text.count(line) == 1
        text = text.replace(line, wrong)
    changed = tmp_path / "changed.py"
    changed.write_text(text, encoding="utf-8")

    done = check(checker, changed)

    assert (done.returncode, f"{len(WRONG)} errors" in done.stdout) == (1, True), done.stdout
