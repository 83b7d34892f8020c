"""Document 100, section by section: each test names its section; those with `place` run on a folder and on S3."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import redis

from housekeeping import events
from housekeeping.testing.stubs import ManualClock
from housekeeping.workers.object_storage import pending_uploads
from tests.declarations import changed
from tests.faults import at_step
from tests.integration.workers.object_storage.conftest import (
    THREE_HOURS,
    Configure,
    Lines,
    Pending,
    Prepare,
    StaleUploads,
    counted,
)
from tests.integration.workers.object_storage.places import Folder, Place
from tests.internals.core import WorkerSettings
from tests.internals.engine import run_sweep
from tests.internals.ledger import OutboxRow
from tests.internals.workers import Claims, outbox_sweep, pending_entry
from tests.internals.workers import uploads_sweep as sweep

SECOND = timedelta(seconds=1)


pytestmark = pytest.mark.usefixtures("postgres", "pending")


def test_only_stale_uploads_are_deleted_with_their_objects(
    place: Place, configure: Configure, prepared: Prepare, still_pending: Pending, clock: ManualClock
) -> None:
    # 出力仕様, 処理フロー 3 to 5: stale is prepared more than 3 h ago; exactly 3 h is not more.
    configure(artifacts=place.settings())
    prepared("may/older", place=place, ago=THREE_HOURS + SECOND)
    prepared("may/exact", place=place, ago=THREE_HOURS)
    prepared("may/newer", place=place, ago=THREE_HOURS - SECOND)
    place.put("may/nobody-knows", "may/older-not")

    result = run_sweep(sweep, clock=clock)

    assert (result.outcome, result.counts) == ("done", counted(3, 1))
    assert still_pending() == {"may/exact", "may/newer"}
    assert place.paths() == {"may/exact", "may/newer", "may/nobody-knows", "may/older-not"}


def test_age_is_counted_in_whole_seconds(
    folder: Folder, configure: Configure, prepared: Prepare, still_pending: Pending, clock: ManualClock
) -> None:
    # 備考 (stale?): prepared in second 0, now 3 h and 0.9 s later: three hours have passed, not more.
    configure(artifacts=folder.settings())
    prepared("may/1", ago=THREE_HOURS)
    clock.advance(timedelta(milliseconds=900))

    assert run_sweep(sweep, clock=clock).counts == counted(1, 0)
    clock.advance(timedelta(milliseconds=100))
    assert run_sweep(sweep, clock=clock).counts == counted(1, 1)


def test_empty_hash_is_done(configure: Configure, place: Place, clock: ManualClock) -> None:
    # 実行可否判定: ends normally when there are no entries; no store is asked.
    configure(artifacts=place.missing())

    result = run_sweep(sweep, clock=clock)

    assert (result.outcome, result.reason, result.counts) == ("done", None, counted(0, 0))


def test_an_upload_without_an_object_is_removed(
    place: Place, configure: Configure, prepared: Prepare, still_pending: Pending, clock: ManualClock
) -> None:
    # 概要: a client that broke off may have uploaded nothing.
    configure(artifacts=place.settings())
    prepared("may/1", "may/3")
    prepared("may/2", "may/4", place=place)

    assert run_sweep(sweep, clock=clock).counts == counted(4, 4)
    assert (still_pending(), place.paths()) == (set(), set())


def test_objects_are_deleted_from_their_own_stores(
    folder: Folder, configure: Configure, prepared: Prepare, pending: redis.Redis, clock: ManualClock
) -> None:
    configure(artifacts={"url": f"file://{folder.root}", "prefix": "a"}, uploads=f"file://{folder.root}/some")
    for path in ("a/1", "some/1"):
        (folder.root / path).parent.mkdir(exist_ok=True)
        (folder.root / path).touch()
    (folder.root / "1").touch()
    prepared("1", location="artifacts")
    prepared("1", location="uploads")

    assert run_sweep(sweep, clock=clock).counts == counted(2, 2)
    assert {path.name for path in folder.root.rglob("*") if path.is_file()} == {"1"}
    assert (folder.root / "1").exists()


def test_disabled_store_is_ignored(
    folder: Folder,
    configure: Configure,
    prepared: Prepare,
    still_pending: Pending,
    pending: redis.Redis,
    clock: ManualClock,
) -> None:
    # 前提条件: object storage enabled. Entries of one that is not count as pending, not as failed.
    configure(artifacts={**folder.settings(), "enabled": False})
    prepared("may/1", "../2", "", place=None)
    prepared("may/3", place=folder)
    pending.hset(pending_entry.KEY, mapping={"artifacts:no-time": "yesterday"})

    assert run_sweep(sweep, clock=clock).counts == counted(5, 0)
    assert len(still_pending()) == 5
    assert folder.paths() == {"may/3"}


def test_event_for_deleted_uploads_is_sent_after_the_commit(
    place: Place, configure: Configure, prepared: Prepare, admin: Any, clock: ManualClock
) -> None:
    # コミットタイミング
    configure(artifacts=place.settings())
    prepared("may/1", "may/2", place.refuse("may/3"))
    heard: list[Any] = []

    def hear(sender: str, *, rows: list[dict[str, str]], worker: str, run_id: int) -> None:
        with admin.cursor() as cursor:
            cursor.execute(f"SELECT counts FROM {admin_schema(admin)}_own.runs WHERE id = {run_id}")
            heard.append((sorted(row["path"] for row in rows), cursor.fetchall()[0][0]["total_deleted_stale_entries"]))

    def stumble(sender: str, **about: Any) -> None:
        raise ValueError("not today")

    with (
        events.upload_deleted.connected_to(stumble),
        events.upload_deleted.connected_to(hear),
    ):
        result = run_sweep(sweep, clock=clock)

    assert result.outcome == "done"
    assert heard == [(["may/1", "may/2"], 2)]


def admin_schema(admin: Any) -> str:
    with admin.cursor() as cursor:
        cursor.execute("SELECT current_schema()")
        return str(cursor.fetchall()[0][0])


def test_deletions_are_logged_if_configured(
    folder: Folder, configure: Configure, prepared: Prepare, lines: Lines, clock: ManualClock
) -> None:
    configure(artifacts=folder.settings())
    prepared("may/1")
    run_sweep(sweep, clock=clock)
    assert lines("Stale upload deleted") == []
    prepared("may/2")

    run_sweep(sweep.configured(WorkerSettings(log_records=True)), clock=clock)

    (line,) = lines("Stale upload deleted")
    assert (line["location"], line["path"]) == ("artifacts", "may/2")


SMALL = changed(sweep, batch=10)


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


@pytest.fixture
def received() -> Iterator[list[str]]:
    paths: list[str] = []

    def handler(rows: list[dict[str, Any]], *, worker: str, run_id: int | None) -> None:
        paths.extend(row["path"] for row in rows)

    events.on(events.upload_deleted, handler, outbox="quota")
    yield paths
    events.off(events.upload_deleted, handler)


def test_deleted_uploads_are_delivered_by_the_next_sweep_of_the_outbox(
    folder: Folder, stale_uploads: StaleUploads, clock: ManualClock, received: list[str]
) -> None:
    stale_uploads(folder, "may/1", "may/2")

    run_sweep(sweep, clock=clock)
    before = list(received)
    delivered = run_sweep(outbox_sweep)

    assert (before, sorted(received)) == ([], ["may/1", "may/2"])
    assert (delivered.counts["delivered_rows"], OutboxRow.select().count()) == (2, 0)


def test_upload_is_in_the_outbox_before_its_entry_is_removed(
    folder: Folder,
    stale_uploads: StaleUploads,
    clock: ManualClock,
    received: list[str],
) -> None:
    stale_uploads(folder, "may/1")
    stored: list[int] = []

    def die() -> None:
        stored.append(OutboxRow.select().count())
        raise SystemExit("killed")

    with at_step(Claims, "finish", "before", die), pytest.raises(SystemExit):
        run_sweep(sweep, clock=clock)

    assert stored == [1]
    assert run_sweep(outbox_sweep).counts["delivered_rows"] == 1
    assert received == ["may/1"]
