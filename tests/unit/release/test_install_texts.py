"""Every text that says how to install the package names this project, not the one that owns `housekeeping`."""

from __future__ import annotations

import configparser
import re
import subprocess
from pathlib import Path
from typing import Final

import housekeeping
from tests.internals.core import DISTRIBUTION, how_to_install

ROOT: Final = Path(__file__).parents[3]
_NAME: Final = r"(?<![\w./-])housekeeping(?![\w/-]|\.\w)"
_INSTALL: Final = r"\b(?:pip3?|pipx|uv|poetry|pdm)\s+(?:install|add|download|wheel|run)"
_ON_ONE_LINE: Final = re.compile(rf"{_INSTALL}(?:[^\S\n]+[^\s&;|#`]+)*?[^\S\n]+[\"']?{_NAME}")
_ON_TWO_LINES: Final = re.compile(rf"{_INSTALL}[\s\"'\\]+f?[\"']?{_NAME}")
_AS_REQUIREMENT: Final = re.compile(r"(?<![\w-])housekeeping(?:\\?\[[a-z]+(?:,\s?[a-z]+)*\\?\]|\s?(?:[=~]=|>=)\s?\d)")
_WRONG: Final = (_ON_ONE_LINE, _ON_TWO_LINES, _AS_REQUIREMENT)


def _wrong_in(text: str) -> list[str]:
    return [found.group() for pattern in _WRONG for found in pattern.finditer(text)]


def _texts() -> list[Path]:
    git = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(git, cwd=ROOT, check=True, capture_output=True, text=True).stdout.splitlines()
    kinds = (".py", ".md", ".cfg", ".toml", ".ini", ".txt", ".html", ".yaml", ".yml", ".json", ".sh", "run")
    files = [ROOT / name for name in names if name.endswith(kinds)]
    return [file for file in files if file.exists() and file != Path(__file__)]


def test_no_text_installs_the_project_that_owns_the_name() -> None:
    wrong = {str(file.relative_to(ROOT)): _wrong_in(file.read_text(encoding="utf-8")) for file in _texts()}

    assert {name: found for name, found in wrong.items() if found} == {}


def test_metadata_has_the_name_that_messages_use() -> None:
    setup = configparser.ConfigParser(interpolation=None)
    setup.read(ROOT / "setup.cfg", encoding="utf-8")

    assert setup["metadata"]["name"] == DISTRIBUTION == "dramatiq-housekeeping"
    assert "housekeeping = housekeeping.cli.main:main" in setup["options.entry_points"]["console_scripts"]


def test_message_installs_an_extra_from_clone_wheel_and_name() -> None:
    message = how_to_install("sentry")

    wheel = f"dramatiq_housekeeping-{housekeeping.__version__}-py3-none-any.whl"
    assert re.findall(r"pip install '([^']+)'", message) == [
        ".[sentry]",
        f"{wheel}[sentry]",
        "dramatiq-housekeeping[sentry]",
    ]
