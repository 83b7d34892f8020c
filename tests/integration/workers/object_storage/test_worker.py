"""Document 100, section by section: each test names its section; those with `place` run on a folder and on S3."""

from __future__ import annotations

import dataclasses
import threading
from datetime import timedelta
from typing import Any

import pytest
import redis
from dramatiq.brokers.stub import StubBroker

from housekeeping.core import events
from housekeeping.core.errors import SettingsError
from housekeeping.core.settings import Settings, WorkerSettings
from housekeeping.database.connection import Database
from housekeeping.installation import install
from housekeeping.sweeps.engine.runner import run_sweep
from housekeeping.sweeps.insight.plan import dry_run, plan
from housekeeping.testing import ManualClock
from housekeeping.workers.object_storage import pending_entry
from housekeeping.workers.object_storage.worker import sweep
from tests.integration.workers.object_storage.conftest import THREE_HOURS, Configure, Lines, Pending, Prepare, counted
from tests.integration.workers.object_storage.places import Folder, Place

SECOND = timedelta(seconds=1)
SMALL = dataclasses.replace(sweep, batch_size=10)


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


def test_a_second_run_changes_nothing(
    place: Place, configure: Configure, prepared: Prepare, pending: redis.Redis, clock: ManualClock
) -> None:
    # 実行可否判定, 排他制御: idempotent!
    configure(artifacts=place.settings())
    prepared("may/1", place=place)
    prepared("may/2", place=place, ago=THREE_HOURS)
    run_sweep(sweep, clock=clock)
    before = pending.hgetall(pending_entry.KEY)

    assert run_sweep(sweep, clock=clock).counts == counted(1, 0)
    assert pending.hgetall(pending_entry.KEY) == before
    assert place.paths() == {"may/2"}


def test_concurrent_runs_remove_each_entry_once(
    folder: Folder, configure: Configure, prepared: Prepare, still_pending: Pending, postgres: Database
) -> None:
    # 排他制御: 個別エントリの削除は競合しにくい設計
    configure(artifacts=folder.settings())
    prepared(*(f"may/{number}" for number in range(5_000)), place=folder)
    start, results = threading.Barrier(2), list[Any]()

    def run() -> None:
        with postgres.connection_context():
            start.wait(timeout=10)
            results.append(run_sweep(dataclasses.replace(sweep, batch_size=100), clock=ManualClock()))

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)

    assert [(result.outcome, result.counts["failed"]) for result in results] == [("done", 0)] * 2
    assert sum(result.counts["total_deleted_stale_entries"] for result in results) == 5_000
    assert (still_pending(), folder.paths()) == (set(), set())


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


def test_plan_matches_the_run_and_changes_nothing(
    folder: Folder, configure: Configure, prepared: Prepare, pending: redis.Redis, clock: ManualClock
) -> None:
    configure(artifacts=folder.settings(), off={**folder.settings(), "enabled": False})
    prepared("may/1", "../2", place=None)
    prepared("may/3", ago=5 * THREE_HOURS, place=folder)
    prepared("may/4", ago=SECOND)
    prepared("may/5", location="off")
    before = pending.hgetall(pending_entry.KEY)

    planned = plan(sweep, clock=clock)
    expected = dry_run(sweep, clock=clock)

    assert (planned.stale.rows, planned.stale.exact, planned.batches) == (2, True, 1)
    assert planned.oldest == clock.now() - 5 * THREE_HOURS
    assert planned.newest == clock.now() - THREE_HOURS - SECOND
    assert [sample["path"] for sample in planned.stages[0][0].samples] == ["may/3", "may/1"]
    assert (pending.hgetall(pending_entry.KEY), folder.paths()) == (before, {"may/3"})
    assert run_sweep(sweep, clock=clock).counts == expected.counts == counted(5, 2, failed=1)


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
    assert (sweep.max_runtime, sweep.stale_after) == (timedelta(seconds=250), timedelta(hours=3))
    assert (sweep.feature_category, sweep.data_consistency) == ("job_artifacts", "sticky")
    assert (sweep.alerts.longest_run, sweep.alerts.backlog) == (timedelta(seconds=250), 10_000)
    assert sweep.alerts.failed_runs == 3
    assert actor.queue_name == "cronjob" and sweep.argument_name is None
    assert actor.options["deduplicate"] == "until_executed" and actor.options["idempotent"] is True
    assert actor.options["max_retries"] == 25


def test_unused_settings_are_rejected() -> None:
    changed = sweep.configured(WorkerSettings(stale_after_s=60, batch_size=500, max_runtime_s=10, log_records=True))
    assert (changed.stale_after, changed.batch_size) == (timedelta(minutes=1), 500)

    with pytest.raises(SettingsError, match="no use for it"):
        sweep.configured(WorkerSettings(page_size=10))
