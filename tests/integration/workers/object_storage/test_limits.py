"""Document 100, パフォーマンス要件, 処理フロー 4, トランザクション仕様: time, memory, round trips, pages."""

from __future__ import annotations

import dataclasses
import threading
from datetime import timedelta
from typing import Any

import pytest

from housekeeping import Sweep
from housekeeping.testing.stubs import ManualClock
from housekeeping.workers.object_storage import pending_uploads
from tests.declarations import changed
from tests.integration.sweeps.conftest import low_floor as low_floor
from tests.integration.sweeps.engine.sizing import Impatient, past_runs
from tests.integration.workers.object_storage.conftest import Configure, Pending, Prepare, counted
from tests.integration.workers.object_storage.places import Folder
from tests.internals.engine import run_sweep
from tests.internals.workers import MAX_EXEC_DURATION
from tests.internals.workers import uploads_sweep as sweep

SECOND = timedelta(seconds=1)
SMALL = changed(sweep, batch=10)
#: Does not look at the backlog when it ends.


def _without_rates(of: Sweep) -> Any:
    """Return the stage without counts of processed rows, so that the end of a run does not count the backlog."""
    stage = sweep.stages(of)
    stage.progress_counts = ()
    return stage


QUIET = changed(SMALL, alerts=dataclasses.replace(sweep.alerts, backlog=None), stages=_without_rates)


pytestmark = pytest.mark.usefixtures("postgres", "pending")


@pytest.fixture
def cursors(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """The cursor of each page that was read, and that of the next."""
    seen: list[tuple[int, int]] = []
    page = pending_uploads.page

    def page_and_note(cursor: int, size: int, before: int | None) -> Any:
        following, found = page(cursor, size, before)
        if size != pending_uploads.PAGE:  # read by the run, and not for the backlog at its end
            seen.append((cursor, following))
        return following, found

    monkeypatch.setattr(pending_uploads, "page", page_and_note)
    return seen


def test_next_run_continues_with_the_next_page(
    folder: Folder, configure: Configure, prepared: Prepare, cursors: list[tuple[int, int]]
) -> None:
    # エラーケース一覧, タイムアウト: 次回実行で継続処理
    configure(artifacts=folder.settings())
    prepared(*(f"may/{number}" for number in range(2_000)))

    for _ in range(3):
        run_sweep(QUIET, clock=ManualClock(tick=2 * MAX_EXEC_DURATION))

    (first, second, third) = cursors
    assert first[0] == 0 and second[0] == first[1] != 0 and third[0] == second[1] != 0


def test_next_run_begins_with_the_interrupted_page(
    folder: Folder, configure: Configure, prepared: Prepare, cursors: list[tuple[int, int]]
) -> None:
    # A page asks between 32, 64, 128, 256 and the other files, and after them; the sixth answer is that time is up.
    configure(artifacts=folder.settings())
    prepared(*(f"may/{number}" for number in range(5_000)))
    pages_of_500 = changed(QUIET, batch=500)

    first = run_sweep(pages_of_500, clock=ManualClock(tick=MAX_EXEC_DURATION / 5))
    (_, (cut, _)) = cursors
    run_sweep(pages_of_500, clock=ManualClock())

    assert first.outcome == "partial" and 700 < first.counts["total_deleted_stale_entries"] < 800
    assert cursors[2][0] == cut != 0


@pytest.mark.slow
def test_slow_refusals_do_not_starve_other_objects(
    folder: Folder, configure: Configure, prepared: Prepare, still_pending: Pending
) -> None:
    # Each run has time for 32 of them, and all are on one page.
    configure(artifacts=folder.settings())
    poison = {folder.refuse(f"may/poison-{number}") for number in range(100)}
    prepared(*poison)
    prepared(*(f"may/{number}" for number in range(20)))

    for _ in range(80):
        run_sweep(sweep, clock=ManualClock(tick=2 * MAX_EXEC_DURATION))

    assert still_pending() == poison


@pytest.mark.slow
def test_slow_store_does_not_starve_another(folder: Folder, configure: Configure, prepared: Prepare) -> None:
    # Each run has time for 32 of its objects, and it refuses all of them.
    configure(artifacts=folder.settings(), uploads=folder.settings())
    prepared(*(folder.refuse(f"may/poison-{number}") for number in range(100)))
    prepared("may/1", location="uploads")

    for _ in range(80):
        run_sweep(sweep, clock=ManualClock(tick=2 * MAX_EXEC_DURATION))

    assert not pending_uploads.exists("uploads", "may/1")


@pytest.mark.slow
def test_slow_refusals_at_the_front_do_not_use_up_a_limited_run(
    folder: Folder, configure: Configure, prepared: Prepare, still_pending: Pending
) -> None:
    # A batch takes one entry, because of its rate, and a run has time for one batch.
    configure(artifacts=folder.settings())
    poison = {folder.refuse(f"may/poison-{number}") for number in range(5)}
    prepared(*poison, "may/1")
    paced = changed(sweep, rows_per_s=1.0)

    for _ in range(200):
        run_sweep(paced, clock=ManualClock(tick=2 * MAX_EXEC_DURATION))

    assert still_pending() == poison


def test_time_limit_is_checked_between_chunks_of_a_page(
    folder: Folder, configure: Configure, prepared: Prepare, still_pending: Pending
) -> None:
    # 処理フロー 4: checked after every batch of deletes, which is completed. A small hash comes as one page.
    configure(artifacts=folder.settings(), uploads=folder.settings())
    prepared("may/1", "may/2", place=folder)
    prepared("may/3", "may/4", location="uploads", place=folder)

    result = run_sweep(sweep, clock=ManualClock(tick=2 * MAX_EXEC_DURATION))

    assert (result.outcome, result.counts) == ("partial", counted(4, 2, timeout=True))
    assert len(folder.paths()) == 2

    assert run_sweep(sweep, clock=ManualClock()).counts == counted(2, 2)


def test_late_end_of_the_last_batch_is_done_with_the_timeout_flag(
    folder: Folder, configure: Configure, prepared: Prepare
) -> None:
    configure(artifacts=folder.settings())
    prepared("may/1")

    result = run_sweep(sweep, clock=ManualClock(tick=2 * MAX_EXEC_DURATION))

    # 処理フロー 4, フローチャート: the time is asked after the last entry, too.
    assert (result.outcome, result.counts) == ("done", counted(1, 1, timeout=True))


def test_resumed_run_also_reads_the_front(
    folder: Folder, configure: Configure, prepared: Prepare, clock: ManualClock
) -> None:
    configure(artifacts=folder.settings())
    prepared(*(f"may/{number}" for number in range(2_000)))
    stopping = threading.Event()
    run_sweep(SMALL, clock=clock, stopping=stopping, on_batch=lambda counts: stopping.set())
    # Some of these are among the entries that the first run has passed.
    prepared(*(f"late/{number}" for number in range(500)))

    resumed = run_sweep(sweep, clock=clock)

    assert (resumed.outcome, pending_uploads.count()) == ("done", 0)


def test_stale_entries_of_several_pages_are_one_batch(
    folder: Folder, configure: Configure, prepared: Prepare, cursors: list[tuple[int, int]]
) -> None:
    # 2,000 entries in pages of about 100, a tenth of them stale: a batch is ten pages, and not a page.
    configure(artifacts=folder.settings())
    prepared(*(f"may/{number}" for number in range(200)))
    prepared(*(f"new/{number}" for number in range(1_800)), ago=SECOND)
    seen: list[int] = []

    result = run_sweep(
        changed(QUIET, batch=100),
        clock=ManualClock(),
        on_batch=lambda counts: seen.append(counts["total_deleted_stale_entries"]),
    )

    assert result.counts == counted(2_000, 200)
    assert 2 <= len(seen) <= 3 and len(cursors) > 15


def test_batch_reads_at_most_ten_pages(
    folder: Folder, configure: Configure, prepared: Prepare, cursors: list[tuple[int, int]]
) -> None:
    # A hash with nothing stale is read in pieces, between which the run can be stopped.
    configure(artifacts=folder.settings())
    prepared(*(f"new/{number}" for number in range(3_000)), ago=SECOND)
    seen: list[int] = []

    run_sweep(changed(QUIET, batch=100), clock=ManualClock(), on_batch=lambda _: seen.append(len(cursors)))

    assert seen[:2] == [10, 20]


def test_slow_run_with_a_refused_upload_reaches_the_others(
    folder: Folder, configure: Configure, prepared: Prepare, still_pending: Pending
) -> None:
    configure(artifacts=folder.settings())
    prepared(*(f"may/{number}" for number in range(6)))
    folder.refuse("may/3")
    clock = ManualClock()

    result = run_sweep(changed(SMALL, rows_per_s=1), clock=clock, stopping=Impatient(clock))

    assert (result.outcome, result.counts["total_deleted_stale_entries"], result.counts["failed"]) == ("done", 5, 1)
    assert len(still_pending()) == 1
    assert result.duration_s >= 5


@pytest.mark.usefixtures("low_floor")
def test_breaker_limit_holds_within_one_page(
    folder: Folder, configure: Configure, prepared: Prepare, still_pending: Pending
) -> None:
    # Redis hands over a small hash as one page, whatever the size of a batch.
    configure(artifacts=folder.settings())
    prepared(*(f"may/{number}" for number in range(25)))
    past_runs(10, 0, worker=sweep.name, counted_as="total_deleted_stale_entries")
    limited = changed(sweep, guard_action="limit")

    ends = [(run_sweep(limited, clock=ManualClock()).reason, len(still_pending())) for _ in range(3)]

    assert ends == [("breaker", 15), ("breaker", 5), (None, 0)]
