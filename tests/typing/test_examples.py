"""The code of the pages about own sweeps passes strict type checkers."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Final

import pytest

from tests.typing.test_inference import CHECKERS, ROOT
from tests.unit.docs.blocks import blocks

pytestmark = pytest.mark.slow

#: The other pages use what comes without types: Django, playhouse, and peewee's queries.
PAGES: Final = ("own-sweep", "own-sweep-sqlalchemy", "own-sweep-side-effect")


@pytest.mark.parametrize("page", PAGES)
def test_modules_of_a_page_pass_pyright_strict(page: str, tmp_path: Path) -> None:
    settings = f'[tool.pyright]\ntypeCheckingMode = "strict"\nextraPaths = ["{ROOT}"]\n'
    (tmp_path / "pyproject.toml").write_text(settings)
    for block in blocks(ROOT / f"docs/howto/{page}.md"):
        if module := re.match(r"# (\S+\.py)\n", block.text):
            path = tmp_path / module[1]
            path.parent.mkdir(exist_ok=True)
            path.write_text(block.text)

    command = [*CHECKERS["pyright"], "--project", str(tmp_path)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=600)

    assert done.returncode == 0, done.stdout
    assert "0 errors" in done.stdout
