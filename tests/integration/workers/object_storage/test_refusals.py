"""Document 100, エラー処理: an entry that cannot be processed fails alone. `place` is a folder and S3."""

from __future__ import annotations

import logging
from datetime import timedelta
from typing import Any

import pytest
import redis

from housekeeping.testing.stubs import ManualClock
from housekeeping.workers.object_storage import pending_uploads
from tests.declarations import changed
from tests.integration.workers.object_storage.conftest import THREE_HOURS, Configure, Lines, Pending, Prepare, counted
from tests.integration.workers.object_storage.places import Folder, Place
from tests.internals.engine import run_sweep
from tests.internals.workers import pending_entry
from tests.internals.workers import uploads_sweep as sweep

SECOND = timedelta(seconds=1)
SMALL = changed(sweep, batch=10)


pytestmark = pytest.mark.usefixtures("postgres", "pending")


@pytest.mark.parametrize(
    ("field", "value", "why"),
    [
        (b"artifacts:may/1", b"yesterday", "not a number"),
        (b"artifacts:may/1", b"-5", "not a number"),
        (b"artifacts:may/1", b"1.5", "not a number"),
        (b"artifacts:may/1", b"", "not a number"),
        (b"artifacts:may/1", b"1700000000000", "not a number"),
        (b"artifacts:may/1", b"9" * 5000, "not a number"),
        (b"artifacts:", b"1", "empty"),
        (b"artifacts:/etc/passwd", b"1", "absolute"),
        (b"artifacts:../other", b"1", "leaves its store"),
        (b"artifacts:a/../../other", b"1", "leaves its store"),
        (b"artifacts:a/..", b"1", "leaves its store"),
        (b"artifacts:victim/", b"1", "empty component"),
        (b"artifacts:a//victim", b"1", "empty component"),
        (b"artifacts:./victim", b"1", "empty component"),
        (b"artifacts:a\nb", b"1", "control characters"),
        (b"artifacts:a\x00b", b"1", "control characters"),
        (b"artifacts:\xff\xfe", b"1", "not UTF-8"),
        (b"\xff:a", b"1", "not UTF-8"),
        (b"nowhere:a", b"1", "no location 'nowhere'"),
        (b"no-colon", b"1", "path is empty"),
        (b"", b"1", "path is empty"),
    ],
)
def test_invalid_entry_is_kept_logged_and_counted(
    folder: Folder,
    configure: Configure,
    prepared: Prepare,
    pending: redis.Redis,
    reported: list[dict[str, Any]],
    lines: Lines,
    clock: ManualClock,
    field: bytes,
    value: bytes,
    why: str,
) -> None:
    # エラーケース一覧, エラーログ
    configure(artifacts=folder.settings())
    folder.put("victim", "a/victim")
    prepared("may/good", place=folder)
    pending.hset(pending_entry.KEY, field, value)

    result = run_sweep(sweep, clock=clock)

    assert (result.outcome, result.counts) == ("done", counted(2, 1, failed=1))
    assert pending.hgetall(pending_entry.KEY) == {field: value}
    assert folder.paths() == {"victim", "a/victim"}
    (report,) = reported
    assert why in str(report["error"])
    (line,) = lines("Record rejected")
    assert why in line["error"] and line["levelno"] == logging.ERROR


def test_invalid_fresh_entry_is_ignored(
    folder: Folder, configure: Configure, prepared: Prepare, clock: ManualClock
) -> None:
    configure(artifacts=folder.settings())
    prepared("../1", ago=THREE_HOURS)
    prepared("2", location="nowhere", ago=THREE_HOURS)

    assert run_sweep(sweep, clock=clock).counts == counted(2, 0)


@pytest.mark.slow
def test_refused_object_among_10_000_fails_alone(
    place: Place,
    configure: Configure,
    prepared: Prepare,
    still_pending: Pending,
    reported: list[dict[str, Any]],
    lines: Lines,
    clock: ManualClock,
) -> None:
    # エラーケース一覧, トランザクション範囲: エントリ単位
    configure(artifacts=place.settings())
    prepared(*(f"may/{number}" for number in range(9_999)))
    place.put(*(f"may/{number}" for number in range(0, 9_999, 500)))
    poison = place.refuse("may/poison")
    prepared(poison)

    result = run_sweep(sweep, clock=clock)

    assert (result.outcome, result.counts) == ("done", counted(10_000, 9_999, failed=1))
    assert still_pending() == {poison}
    assert len(place.paths()) == 1
    assert [(report["location"], report["path"]) for report in reported] == [("artifacts", poison)]
    assert [line["record"]["path"] for line in lines("Record rejected")] == [poison]


@pytest.mark.parametrize(
    "path", ["file/below", "file/far/below", "link/below", "x" * 256, f"{'x' * 256}/below", "x/" * 2100 + "x"]
)
def test_path_that_no_file_can_have_counts_as_missing(
    folder: Folder, configure: Configure, prepared: Prepare, still_pending: Pending, clock: ManualClock, path: str
) -> None:
    # A parent is a file, or the name is too long: the upload can never have been written.
    configure(artifacts=folder.settings())
    folder.put("file")
    (folder.root / folder.prefix / "link").symlink_to("file")
    prepared(path)

    assert run_sweep(sweep, clock=clock).counts == counted(1, 1)
    assert (still_pending(), folder.paths()) == (set(), {"file", "link"})


def test_entry_returned_twice_fails_once(
    folder: Folder, configure: Configure, prepared: Prepare, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    configure(artifacts=folder.settings())
    prepared("../poison", folder.refuse("may/poison"), "may/good")
    page = pending_uploads.page
    monkeypatch.setattr(pending_uploads, "page", lambda cursor, size, before: (1 - cursor, page(0, size, before)[1]))

    assert run_sweep(sweep, clock=clock).counts == counted(3, 1, failed=2)
