"""Settings of a store, the object of a path, and symbolic links in a local folder."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from housekeeping import ObjectNotDeleted, Settings
from housekeeping.testing.stubs import ManualClock
from tests.faults import at_step, exit_code_of_fork, once
from tests.integration.workers.object_storage.conftest import Configure, Lines, Pending, Prepare, counted
from tests.integration.workers.object_storage.places import Folder, Place
from tests.integration.workers.object_storage.s3_server import S3Server
from tests.internals.core import ObjectStoreSettings, ObjectStoreUnavailable, SettingsError
from tests.internals.engine import run_sweep
from tests.internals.workers import ObjectStore, delete_file, parse_store_url, stores
from tests.internals.workers import uploads_sweep as sweep

HIDDEN = "hush-hush-1234"


@pytest.mark.parametrize(
    ("url", "prefix", "address"),
    [
        ("file:///srv/files", "", ("file", "/srv/files", "")),
        ("file:///srv/my%20files/", "p/q", ("file", "/srv/my files", "p/q/")),
        ("s3://bucket", "", ("s3", "bucket", "")),
        ("s3://bucket/", "", ("s3", "bucket", "")),
        ("s3://bucket/a/b/", "/c/", ("s3", "bucket", "a/b/c/")),
        ("gs://bucket/a", "", ("gs", "bucket", "a/")),
        ("az://container/a", "b", ("az", "container", "a/b/")),
    ],
)
def test_url_and_prefix_are_parsed(url: str, prefix: str, address: tuple[str, str, str]) -> None:
    assert parse_store_url("artifacts", ObjectStoreSettings(url=url, prefix=prefix)) == address


@pytest.mark.parametrize(
    ("url", "prefix", "why"),
    [
        ("file://relative/folder", "", "absolute path"),
        ("file:///", "", "absolute path"),
        ("file:///srv/../etc", "", "absolute path"),
        ("s3:///prefix", "", "bucket"),
        ("s3://bucket?region=x", "", "options"),
        ("s3://user@bucket", "", "options"),
        ("s3://bucket/a//b", "", "without .."),
        ("s3://bucket/../b", "", "without .."),
        ("file:///srv", "../b", "without .."),
    ],
)
def test_invalid_url_is_rejected_in_one_line(url: str, prefix: str, why: str) -> None:
    with pytest.raises(SettingsError, match=why) as refused:
        parse_store_url("artifacts", ObjectStoreSettings(url=url, prefix=prefix))

    assert "\n" not in str(refused.value)
    assert 'HOUSEKEEPING_OBJECT_STORES["artifacts"]' in str(refused.value)


@pytest.mark.parametrize(
    "given",
    [
        {"url": "ftp://x/y"},
        {"url": "s3://bucket", "options": {"nonsense": HIDDEN}},
        {"url": "s3://bucket", "options": {"timeout": "long"}},
        {"url": "s3://bucket", "options": {"allow_http": "perhaps", "aws_secret_access_key": HIDDEN}},
        {"url": "az://container"},
        {"url": "az://container", "options": {"account_name": "a", "account_key": f"{HIDDEN}!!"}},
        {"url": "gs://bucket", "options": {"service_account_key": f"{{{HIDDEN}"}},
        {"url": "file:///srv", "options": {"mkdir": "true"}},
    ],
)
def test_invalid_store_is_rejected_without_secrets(given: dict[str, Any]) -> None:
    with pytest.raises(SettingsError) as refused:
        stores.configure(Settings.load(object_stores=json.dumps({"artifacts": given})))

    assert HIDDEN not in str(refused.value) and "\n" not in str(refused.value)
    assert "artifacts" in str(refused.value)


def test_a_location_with_a_colon_is_refused() -> None:
    with pytest.raises(SettingsError, match="colon"):
        stores.configure(Settings.load(object_stores='{"a:b": "file:///srv"}'))


def test_store_without_the_extra_is_rejected_unless_disabled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "obstore", None)

    with pytest.raises(SettingsError, match=r"housekeeping\[s3\]' once it is released"):
        ObjectStore("artifacts", ObjectStoreSettings(url="s3://bucket"))

    assert not ObjectStore("artifacts", ObjectStoreSettings(url="s3://bucket", enabled=False)).enabled


@pytest.mark.parametrize(
    ("url", "options"),
    [
        ("s3://bucket/prefix", {"aws_access_key_id": "a", "aws_secret_access_key": "b", "region": "eu-central-1"}),
        ("gs://bucket/prefix", {"skip_signature": "true"}),
        ("az://container/prefix", {"account_name": "a", "account_key": "c2VjcmV0", "timeout": "5s"}),
        ("memory:///", {}),
    ],
)
def test_every_kind_of_store_is_made_from_the_same_settings(url: str, options: dict[str, str]) -> None:
    store = ObjectStore("artifacts", ObjectStoreSettings(url=url, options=options))

    assert store.client() is store.client()
    assert all(value not in repr(store) for value in options.values() if len(value) > 1)


def test_memory_store_is_available() -> None:
    ObjectStore("artifacts", ObjectStoreSettings(url="memory:///")).check_access()


def test_errors_of_a_store_show_no_secret(s3: S3Server) -> None:
    options = s3.options(("all-access", HIDDEN))
    store = ObjectStore("artifacts", ObjectStoreSettings(url="s3://uploads", options=options))

    with pytest.raises(ObjectStoreUnavailable) as error:
        store.check_access()

    assert str(error.value).endswith("SignatureDoesNotMatch")
    assert error.value.__cause__ is None
    assert store.describe_error(f"signed with {HIDDEN}") == "signed with ***"


def test_client_used_before_a_fork_raises(s3: S3Server) -> None:
    store = ObjectStore("artifacts", ObjectStoreSettings(url="s3://uploads", options=s3.options()))
    store.check_access()

    def used() -> int:
        try:
            store.check_access()
        except ObjectStoreUnavailable as error:
            return 7 if "fork" in str(error) else 1
        return 0

    assert exit_code_of_fork(used) == 7


HOSTILE = [
    "may/a b",
    "may/a%20b",
    "may/a%b",
    "may/a#b",
    "may/a#1x",
    "may/a?b",
    "may/a&b<c>\"d'",
    "may/~t",
    "may/{b}[c]^`|",
    "may/né",
    "may/ne\u0301",
    "may/a:b",
    "may/*",
    "may/-rf",
    "may/.hidden",
    "may/...",
    "may/\u202egnp.exe",
    "may/" + "x" * 200,
]


@pytest.mark.parametrize("path", HOSTILE)
@pytest.mark.usefixtures("postgres", "pending")
def test_a_path_means_the_object_of_exactly_that_key(
    place: Place, configure: Configure, prepared: Prepare, clock: ManualClock, path: str
) -> None:
    configure(artifacts=place.settings())
    others = {other for other in HOSTILE if other != path}
    place.put(*others)
    prepared(path, place=place)

    result = run_sweep(sweep, clock=clock)

    assert result.counts["total_deleted_stale_entries"] == 1
    assert place.paths() == others


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
