"""Stores that are unavailable, slow, or refuse every deletion (エラーケース一覧: オブジェクトストレージ接続エラー)."""

from __future__ import annotations

import shutil
import socket
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import redis

from housekeeping.testing.stubs import ManualClock
from housekeeping.workers.object_storage import pending_uploads
from tests.declarations import changed
from tests.faults import at_step, lose_connection, redis_fault
from tests.integration.workers.object_storage.conftest import Configure, Lines, Pending, Prepare, StaleUploads, counted
from tests.integration.workers.object_storage.places import Folder, Place
from tests.internals.core import ObjectStoreUnavailable
from tests.internals.engine import run_sweep
from tests.internals.ledger import Run
from tests.internals.workers import Claims, deletion, stores
from tests.internals.workers import uploads_sweep as sweep

NOWHERE = {"aws_access_key_id": "no-one", "aws_secret_access_key": "nothing", "endpoint": "http://127.0.0.1:1"}

pytestmark = pytest.mark.usefixtures("postgres", "pending")


@pytest.fixture
def silent() -> Iterator[str]:
    """Endpoint that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


def test_missing_bucket_fails_the_run_and_keeps_entries(
    place: Place, configure: Configure, prepared: Prepare, still_pending: Pending, clock: ManualClock
) -> None:
    configure(artifacts=place.missing())
    prepared("may/1", "may/2")

    result = run_sweep(sweep, clock=clock)

    assert result.outcome == "failed" and result.reason is not None
    assert result.reason.startswith("object store 'artifacts': ")
    assert "no folder" in result.reason or result.reason.endswith("NoSuchBucket")
    assert (result.counts["total_pending_entries"], result.counts["total_deleted_stale_entries"]) == (2, 0)
    assert still_pending() == {"may/1", "may/2"}
    with pytest.raises(ObjectStoreUnavailable):
        result.raise_for_failure()  # リトライ仕様: so that its message is retried
    assert pending_uploads.complete("artifacts", "may/1") is True, "the store was asked first, so nothing was claimed"


def test_folder_removed_meanwhile_does_not_count_as_deleted(
    folder: Folder,
    configure: Configure,
    prepared: Prepare,
    still_pending: Pending,
    clock: ManualClock,
) -> None:
    configure(artifacts=folder.settings())
    paths = [f"may/{number}" for number in range(100)]
    prepared(*paths, place=folder)

    def vanish() -> None:
        shutil.rmtree(folder.root, ignore_errors=True)

    with at_step(deletion, "delete_file", "before", vanish):
        result = run_sweep(sweep, clock=clock)

    assert result.outcome == "failed"
    assert still_pending() == set(paths)


def test_unavailable_store_does_not_hold_up_the_others(
    folder: Folder, configure: Configure, prepared: Prepare, pending: redis.Redis, lines: Lines, clock: ManualClock
) -> None:
    configure(artifacts=folder.settings(), uploads={"url": "s3://bucket", "options": NOWHERE})
    for number in range(700):
        prepared(f"may/{number}", location="artifacts" if number % 2 else "uploads")

    result = run_sweep(changed(sweep, batch=100), clock=clock)

    assert result.outcome == "failed" and result.reason is not None
    assert "'uploads'" in result.reason and "'artifacts'" not in result.reason
    assert result.counts["total_deleted_stale_entries"] == 350
    assert len(lines("Object store unavailable; ignored for this run")) == 1, "asked once, not once a page"


def test_run_after_a_store_outage_begins_at_the_front(
    folder: Folder,
    configure: Configure,
    prepared: Prepare,
    still_pending: Pending,
    last_run: Callable[[], Run],
    clock: ManualClock,
) -> None:
    # 障害時対応: 障害発生時は次回定期実行で自動復旧
    prepared("may/1")
    configure(artifacts=folder.missing())
    run_sweep(sweep, clock=clock)
    assert last_run().cursor is None
    configure(artifacts=folder.settings())

    result = run_sweep(sweep, clock=clock)

    assert (result.outcome, still_pending()) == ("done", set())


def test_time_out_does_not_hide_an_unavailable_store(folder: Folder, configure: Configure, prepared: Prepare) -> None:
    configure(artifacts=folder.missing())
    prepared(*(f"may/{number}" for number in range(2_000)))

    result = run_sweep(changed(sweep, batch=10), clock=ManualClock(tick=timedelta(minutes=10)))

    assert result.outcome == "failed" and result.counts["execution_timeout"] is True


@pytest.mark.parametrize(
    ("endpoint", "reason"),
    [
        ("http://127.0.0.1:1", "Connection refused"),
        ("http://no-such-host.invalid", "failed to lookup address information"),
        (None, "TimedOut"),
    ],
)
def test_reason_names_why_no_answer_came(
    configure: Configure, prepared: Prepare, silent: str, clock: ManualClock, endpoint: str | None, reason: str
) -> None:
    options = {"endpoint": endpoint} if endpoint else {"endpoint": silent, "timeout": "50ms"}
    configure(artifacts={"url": "s3://bucket", "options": {**NOWHERE, **options}})
    prepared("may/1")

    result = run_sweep(sweep, clock=clock)

    assert result.reason is not None and f"error sending request: {reason}" in result.reason


def test_requests_and_retries_end_well_within_a_run() -> None:
    seconds = float(stores._CLIENT["timeout"].removesuffix("s"))
    at_most = stores.RETRY["retry_timeout"].total_seconds() + seconds

    assert 2 * at_most < sweep.limits.runtime.total_seconds() / 2


def test_store_that_refuses_all_is_ignored_after_100(
    folder: Folder, configure: Configure, prepared: Prepare, reported: list[dict[str, Any]], clock: ManualClock
) -> None:
    configure(artifacts=folder.settings())
    prepared(*(folder.refuse(f"may/{number}") for number in range(300)))

    result = run_sweep(sweep, clock=clock)

    assert result.outcome == "failed" and result.reason is not None
    assert "refuses every deletion" in result.reason
    assert 100 <= result.counts["failed"] < 132
    assert [each.get("rows") for each in reported] == [None, result.counts["failed"]], "the run, and one cause"


def test_store_with_any_deletion_is_not_ignored(
    folder: Folder, configure: Configure, prepared: Prepare, clock: ManualClock
) -> None:
    configure(artifacts=folder.settings())
    prepared(*(folder.refuse(f"may/poison-{number}") for number in range(150)))
    prepared(*(f"may/{number}" for number in range(300)), place=folder)

    result = run_sweep(sweep, clock=clock)

    assert (result.outcome, result.counts["failed"]) == ("done", 150)


def test_redis_outage_after_deletions_costs_a_repetition(
    folder: Folder,
    stale_uploads: StaleUploads,
    still_pending: Pending,
    clock: ManualClock,
) -> None:
    # 障害時対応: 再実行しても整合性が保たれる
    stale_uploads(folder, "may/1", "may/2")

    with at_step(Claims, "finish", "before", lose_connection):
        first = run_sweep(sweep, clock=clock)
    claimed = pending_uploads.complete("artifacts", "may/1")
    again = run_sweep(sweep, clock=clock)

    assert (first.outcome, claimed) == ("failed", False)
    assert again.counts == counted(2, 2), "it finds the objects missing"
    assert (folder.paths(), still_pending()) == (set(), set())


def test_redis_outage_at_the_backlog_alert_keeps_the_run(
    folder: Folder, configure: Configure, clock: ManualClock
) -> None:
    configure(artifacts=folder.settings())

    with redis_fault("\r\nEVAL\r\n"):
        result = run_sweep(sweep, clock=clock)

    assert (result.outcome, Run.get_by_id(result.run_id).backlog) == ("failed", None)
