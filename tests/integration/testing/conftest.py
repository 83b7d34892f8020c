"""Fixtures: an application's tables, and a separate pytest process."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from configparser import ConfigParser
from pathlib import Path
from typing import Final

import pytest

from tests.integration.testing.sessions import Note, Session, fill
from tests.internals.database import Database

_TOP: Final = Path(__file__).parents[3]

#: Runs pytest on files by their contents, with further variables; returns the exit status and the output.
RunPytest = Callable[..., tuple[int, str]]


@pytest.fixture
def sessions(housekeeping_database: Database) -> Iterator[type[Session]]:
    """Create three expired sessions and two others."""
    housekeeping_database.create_tables([Session, Note])
    fill()
    yield Session


@pytest.fixture
def run_pytest(tmp_path: Path, housekeeping_postgres_url: str, housekeeping_redis_url: str) -> RunPytest:
    folder, site = tmp_path / "empty", tmp_path / "site"
    # As in an installation, also where another tree is installed.
    declared = ConfigParser()
    declared.read(_TOP / "setup.cfg")
    about = site / "kit-0.dist-info"
    about.mkdir(parents=True)
    about.joinpath("METADATA").write_text("Metadata-Version: 2.1\nName: kit\nVersion: 0\n")
    about.joinpath("entry_points.txt").write_text(f"[pytest11]\n{declared['options.entry_points']['pytest11']}\n")
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(map(str, (site, _TOP))),
        "HOUSEKEEPING_TEST_DATABASE_URL": housekeeping_postgres_url,
        "HOUSEKEEPING_TEST_REDIS_URL": housekeeping_redis_url,
    }

    def run(files: dict[str, str], **variables: str) -> tuple[int, str]:
        folder.mkdir()
        for name, text in files.items():
            folder.joinpath(name).write_text(text)
        command = [sys.executable, "-P", "-m", "pytest", "-W", "error", "-p", "no:cacheprovider", "-p", "no:xdist"]
        ended = subprocess.run(
            command, cwd=folder, env=environment | variables, capture_output=True, text=True, timeout=300
        )
        return ended.returncode, ended.stdout + ended.stderr

    return run
