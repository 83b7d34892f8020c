"""Symbolic links in a local folder: a deletion stays below it and removes links, never their targets."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from housekeeping import ObjectNotDeleted
from housekeeping.testing.stubs import ManualClock
from tests.faults import at_step, once
from tests.integration.workers.object_storage.conftest import Configure, Lines, Pending, Prepare, counted
from tests.integration.workers.object_storage.places import Folder
from tests.internals.engine import run_sweep
from tests.internals.workers import delete_file
from tests.internals.workers import uploads_sweep as sweep


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


@pytest.mark.parametrize("name", ["objects", "linked"])
def test_links_within_the_store_and_to_it_are_followed(folder: Folder, tmp_path: Path, name: str) -> None:
    folder.put("real/object", "real/other")
    os.symlink("real", folder.root / folder.prefix / "link")
    os.symlink(folder.root, tmp_path / "linked")

    delete_file(os.path.realpath(tmp_path / name), f"{folder.prefix}/link/object")

    assert folder.paths() == {"real/other"}


def test_folder_replaced_by_a_link_meanwhile_is_refused(folder: Folder, outside: Path) -> None:
    folder.put("link/passwd")
    link = folder.root / folder.prefix / "link"

    def replace() -> None:
        link.rename(folder.root / "moved")
        link.symlink_to(outside.parent)

    with at_step(os, "open", "before", once(replace)), pytest.raises(ObjectNotDeleted, match="symbolic link"):
        delete_file(str(folder.root), f"{folder.prefix}/link/passwd")

    assert outside.exists()


@pytest.mark.parametrize("path", ["missing", "missing/object"])
def test_no_descriptor_is_left_open(folder: Folder, path: str) -> None:
    before = len(os.listdir("/proc/self/fd"))

    with pytest.raises(FileNotFoundError):
        delete_file(str(folder.root), f"{folder.prefix}/{path}")

    assert len(os.listdir("/proc/self/fd")) == before
