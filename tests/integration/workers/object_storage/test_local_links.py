"""Symbolic links in a local folder: a deletion stays below it and removes links, never their targets."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from housekeeping.sweeps.engine.runner import run_sweep
from housekeeping.testing import ManualClock
from housekeeping.workers.object_storage.deletion import delete_files, open_folder
from housekeeping.workers.object_storage.worker import sweep
from tests.integration.workers.object_storage.conftest import Configure, Lines, Pending, Prepare, counted
from tests.integration.workers.object_storage.places import Folder


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    """File outside of the store."""
    file = tmp_path / "outside" / "passwd"
    file.parent.mkdir()
    file.touch()
    return file


@pytest.mark.usefixtures("postgres", "pending")
def test_linked_folder_outside_the_store_keeps_its_file(
    folder: Folder,
    configure: Configure,
    prepared: Prepare,
    still_pending: Pending,
    outside: Path,
    reported: list[dict[str, Any]],
    lines: Lines,
    clock: ManualClock,
) -> None:
    configure(artifacts=folder.settings())
    folder.put("may/good")
    os.symlink(outside.parent, folder.root / folder.prefix / "link")
    prepared("link/passwd", "may/good")

    result = run_sweep(sweep, clock=clock)

    assert outside.exists()
    assert (result.outcome, result.counts) == ("done", counted(2, 1, failed=1))
    assert still_pending() == {"link/passwd"}
    (line,) = lines("Record rejected")
    assert "symbolic link" in line["error"]
    assert [each["path"] for each in reported] == ["link/passwd"]


@pytest.mark.usefixtures("postgres", "pending")
def test_object_that_is_a_link_goes_and_its_target_stays(
    folder: Folder,
    configure: Configure,
    prepared: Prepare,
    still_pending: Pending,
    outside: Path,
    clock: ManualClock,
) -> None:
    configure(artifacts=folder.settings())
    link = folder.root / folder.prefix / "link"
    os.symlink(outside, link)
    prepared("link")

    assert run_sweep(sweep, clock=clock).counts == counted(1, 1)
    assert outside.exists() and not link.is_symlink()
    assert still_pending() == set()


def test_linked_folder_within_the_store_is_followed(folder: Folder) -> None:
    folder.put("real/object", "real/other")
    os.symlink("real", folder.root / folder.prefix / "link")

    delete_files(str(folder.root), [f"{folder.prefix}/link/object"])

    assert folder.paths() == {"real/other"}


def test_store_whose_own_folder_is_a_link_is_followed(folder: Folder, tmp_path: Path) -> None:
    folder.put("object")
    os.symlink(folder.root, tmp_path / "linked")

    delete_files(str(tmp_path / "linked"), [f"{folder.prefix}/object"])

    assert folder.paths() == set()


def test_folder_replaced_by_a_link_meanwhile_is_refused(folder: Folder, outside: Path) -> None:
    # As found after the path was resolved: opening it follows no link.
    os.symlink(outside.parent, folder.root / "link")

    with pytest.raises(OSError):
        open_folder(os.open(folder.root, os.O_RDONLY), ["link"])


def test_no_descriptor_is_left_open(folder: Folder) -> None:
    before = len(os.listdir("/proc/self/fd"))

    paths = ["missing", "missing/object", f"{folder.prefix}/missing", f"{folder.prefix}/missing/object"]
    answers = delete_files(str(folder.root), paths)

    assert [type(answers[path]) for path in paths] == [FileNotFoundError] * 4
    assert len(os.listdir("/proc/self/fd")) == before
