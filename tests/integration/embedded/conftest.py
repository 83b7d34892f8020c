from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

#: Sets the folder for temporary files.
UseTemporary = Callable[[Path], None]


@pytest.fixture
def use_temporary(monkeypatch: pytest.MonkeyPatch) -> UseTemporary:
    return lambda path: monkeypatch.setattr(tempfile, "tempdir", str(path))


@pytest.fixture
def place(use_temporary: UseTemporary, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Empty temporary folder for this test's servers only."""
    # What the whole run may be kept to; these tests say themselves where servers come from.
    monkeypatch.delenv("HOUSEKEEPING_EMBEDDED", raising=False)
    # Not tmp_path: that is too long for a unix socket, and closed to other accounts.
    path = Path(tempfile.mkdtemp(prefix="hk-", dir=os.path.realpath("/tmp")))
    path.chmod(0o1777)
    use_temporary(path)
    monkeypatch.setenv("TMPDIR", str(path))
    yield path
    shutil.rmtree(path)


@pytest.fixture
def programs(place: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder that is all of the PATH."""
    folder = place / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    return folder
