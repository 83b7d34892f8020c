"""Document 100, section by section: each test names its section; those with `place` run on a folder and on S3."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import redis
from dramatiq.brokers.stub import StubBroker

from housekeeping import Settings, events, install
from housekeeping.testing.stubs import ManualClock
from tests.integration.workers.object_storage.conftest import THREE_HOURS, Configure, Lines, Pending, Prepare, counted
from tests.integration.workers.object_storage.places import Folder, Place
from tests.internals.core import SettingsError, WorkerSettings
from tests.internals.engine import run_sweep
from tests.internals.workers import pending_entry
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


def test_run_logs_its_start_and_counts(
    folder: Folder, configure: Configure, prepared: Prepare, lines: Lines, clock: ManualClock
) -> None:
    # ログ出力: 開始ログ, メタデータログ
    configure(artifacts=folder.settings())
    prepared("may/1")

    run_sweep(sweep, clock=clock)

    assert len(lines("Run started")) == 1
    (end,) = lines("Run ended")
    assert {name: end[name] for name in counted(0, 0)} == counted(1, 1)


def test_schedule_limits_and_labels_match_the_document(settings: Settings) -> None:
    # 実行スケジュール, 入力パラメータ, リトライ仕様, 排他制御, 備考
    broker = StubBroker()
    actor = install(broker, settings)[sweep.name]

    assert sweep.schedule == "*/6 * * * *"
    assert (sweep.limits.runtime, sweep.stale_after) == (timedelta(seconds=250), timedelta(hours=3))
    assert (sweep.actor["feature_category"], sweep.actor["data_consistency"]) == ("job_artifacts", "sticky")
    assert (sweep.alerts.longest_run, sweep.alerts.backlog) == (timedelta(seconds=250), 10_000)
    assert sweep.alerts.failed_runs == 3
    assert actor.queue_name == "cronjob" and sweep.argument is None
    assert actor.options["deduplicate"] == "until_executed" and actor.options["idempotent"] is True
    assert actor.options["max_retries"] == 25


def test_unused_settings_are_rejected() -> None:
    changed = sweep.configured(WorkerSettings(stale_after_s=60, batch_size=500, max_runtime_s=10, log_records=True))
    assert (changed.stale_after, changed.limits.batch) == (timedelta(minutes=1), 500)

    with pytest.raises(SettingsError, match="no use for it"):
        sweep.configured(WorkerSettings(page_size=10))
