"""Uploads on a Redis whose clock is hours from the database's (every time of an upload is Redis's)."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from housekeeping import Settings
from housekeeping.testing.stubs import ManualClock
from housekeeping.workers.object_storage import pending_uploads
from tests.integration.conftest import AddStatuses
from tests.integration.workers.object_storage.conftest import Configure
from tests.integration.workers.object_storage.places import Folder
from tests.internals.core import ClocksDiffer, shared_redis
from tests.internals.core import redis_client as make_redis_client
from tests.internals.doctor import doctor
from tests.internals.engine import run_sweep
from tests.internals.insight import plan
from tests.internals.ledger import Run
from tests.internals.workers import configured_sweeps
from tests.internals.workers import status_sweep as statuses
from tests.internals.workers import uploads_sweep as sweep
from tests.shifted_redis import shifted_redis

#: Uses a Redis whose clock is so far ahead of the real one.
Shift = Callable[[timedelta], str]

FOUR_HOURS = timedelta(hours=4)

pytestmark = [
    pytest.mark.usefixtures("postgres", "pending"),
    pytest.mark.plain_redis_only(reason="it starts a Redis of its own"),
]


@pytest.fixture
def shift(settings: Settings, tmp_path: Path) -> Iterator[Shift]:
    before, servers = shared_redis.client, []
    assert before is not None

    def use(ahead: timedelta) -> str:
        server = shifted_redis(tmp_path, ahead)
        servers.append(server)
        url = server.__enter__()
        shared_redis.use(make_redis_client(url), settings.namespace)
        return url

    yield use
    for server in servers:
        server.__exit__(None, None, None)
    shared_redis.use(before, settings.namespace)


@pytest.fixture
def uploaded(folder: Folder, configure: Configure) -> Callable[[], None]:
    """Prepares an upload now and creates its object."""

    def upload() -> None:
        configure(artifacts=folder.settings())
        pending_uploads.prepare("artifacts", "may/fresh")
        folder.put("may/fresh")

    return upload


@pytest.mark.parametrize("ahead", [FOUR_HOURS, -FOUR_HOURS])
def test_run_does_not_start_where_the_clock_of_redis_is_hours_apart(
    shift: Shift, uploaded: Callable[[], None], folder: Folder, last_run: Callable[[], Run], ahead: timedelta
) -> None:
    shift(ahead)
    uploaded()

    result = run_sweep(sweep)

    assert (result.outcome, result.reason, result.exit_code) == ("failed", "clock", 1)
    assert "clocks differ, nothing was changed: this machine (" in str(result.error) and "UTC, Redis " in str(
        result.error
    )
    assert abs(last_run().counts["redis_clock_skew_s"] + ahead.total_seconds()) < 5
    assert (folder.paths(), pending_uploads.count()) == ({"may/fresh"}, 1)
    with pytest.raises(ClocksDiffer):
        result.raise_for_failure()


@pytest.mark.parametrize("ahead", [FOUR_HOURS, -FOUR_HOURS])
def test_forced_run_keeps_a_fresh_upload(
    shift: Shift, uploaded: Callable[[], None], folder: Folder, ahead: timedelta
) -> None:
    shift(ahead)
    uploaded()

    result = run_sweep(sweep, force=True)

    assert (result.outcome, result.counts["total_deleted_stale_entries"]) == ("done", 0)
    assert (folder.paths(), pending_uploads.count()) == ({"may/fresh"}, 1)


def test_forced_run_deletes_an_upload_that_is_stale_by_both_clocks(
    shift: Shift, uploaded: Callable[[], None], folder: Folder
) -> None:
    shift(-FOUR_HOURS)
    uploaded()
    pending_uploads.prepare("artifacts", "may/old", clock=ManualClock(datetime.now(UTC) - 2 * FOUR_HOURS))

    assert run_sweep(sweep, force=True).counts["total_deleted_stale_entries"] == 1
    assert folder.paths() == {"may/fresh"}


def test_difference_of_seconds_to_redis_is_an_alert(
    shift: Shift, uploaded: Callable[[], None], caplog: pytest.LogCaptureFixture
) -> None:
    shift(timedelta(seconds=30))
    uploaded()

    with caplog.at_level(logging.WARNING):
        result = run_sweep(sweep)

    assert result.outcome == "done" and -31 < result.counts["redis_clock_skew_s"] < -25
    assert [each.getMessage() for each in caplog.records] == ["Clocks differ", "Alert"]
    assert "behind Redis's; check NTP" in vars(caplog.records[1])["text"]


def test_plan_shows_that_the_clock_of_redis_keeps_a_run_from_starting(
    shift: Shift, uploaded: Callable[[], None]
) -> None:
    shift(-FOUR_HOURS)
    uploaded()

    planned, forced = plan(sweep), plan(sweep, force=True)

    assert (planned.outcome, planned.reason, planned.stale.rows) == ("failed", "clock", 0)
    assert forced.reason != "clock"


def test_doctor_reports_the_clock_of_redis(shift: Shift, uploaded: Callable[[], None], settings: Settings) -> None:
    url = shift(-FOUR_HOURS)
    given = {
        "redis_url": url,
        "object_stores": Settings.load(object_stores=json.dumps({"a": "memory:///"})).object_stores,
    }
    own = settings.model_copy(update=given)

    found: list[Any] = [each for each in doctor.examine(own, configured_sweeps(own)) if each.area == "redis"]

    assert [(each.level, each.subject) for each in found if each.subject == "clock"] == [("error", "clock")]


def test_worker_without_times_of_redis_runs_with_its_wrong_clock(shift: Shift, add_statuses: AddStatuses) -> None:
    add_statuses(3, "now() - interval '1 second'")
    shift(-FOUR_HOURS)

    assert run_sweep(statuses).counts["deleted_rows"] == 3
