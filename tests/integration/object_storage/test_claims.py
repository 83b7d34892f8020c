"""The claims by which one run, and no other, deletes an upload: who takes them over, and how they end."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import pytest
import redis
from psycopg2.extensions import connection as Connection

from housekeeping.foundation.settings import Settings
from housekeeping.sweeps.own_tables import Run
from housekeeping.sweeps.run import perform
from housekeeping.testing import ManualClock
from housekeeping.workers.object_storage import claims, entries
from housekeeping.workers.object_storage.claims import Claims
from housekeeping.workers.object_storage.entries import Entry
from housekeeping.workers.object_storage.worker import sweep
from tests.integration.object_storage.conftest import THREE_HOURS, Configure, Pending, Prepare
from tests.integration.object_storage.places import Place

pytestmark = pytest.mark.usefixtures("postgres", "pending")


@pytest.mark.parametrize(("older_by", "taken"), [(-1, 0), (1, 1)])
def test_the_claim_of_a_dead_run_is_taken_over_when_it_must_have_ended(
    prepared: Prepare, pending: redis.Redis, settings: Settings, older_by: int, taken: int
) -> None:
    lasts = timedelta(minutes=6)
    prepared("may/1")
    value: Any = pending.hget(entries.KEY, "artifacts:may/1")
    entry = Entry(b"artifacts:may/1", value)
    dead, living = Claims(lasts), Claims(lasts)
    assert dead.take([entry]) == [entry]
    assert living.take([entry]) == []
    left = claims._KEPT - lasts - timedelta(seconds=older_by)
    pending.pexpire(f"{settings.namespace}:upload_claim:artifacts:may/1", left)

    assert len(living.take([entry])) == taken


@pytest.mark.parametrize(
    ("dead", "living", "at_work", "taken"),
    [(7, 8, [6, 8], 1), (7, 8, [7, 8], 0), (9, 8, [8], 0), (None, 8, [8], 0), (7, None, [], 0)],
)
def test_the_claim_of_an_earlier_run_that_is_not_at_work_is_taken_over_at_once(
    prepared: Prepare, pending: redis.Redis, dead: int | None, living: int | None, at_work: list[int], taken: int
) -> None:
    prepared("may/1")
    value: Any = pending.hget(entries.KEY, "artifacts:may/1")
    entry = Entry(b"artifacts:may/1", value)
    asleep, awake = Claims(THREE_HOURS, dead), Claims(THREE_HOURS, living, at_work)
    assert asleep.take([entry]) == [entry]

    assert len(awake.take([entry])) == taken
    assert asleep.settle([entry], []).removed == ([] if taken else [entry])


def test_a_run_that_was_taken_for_dead_begins_no_deletion_and_the_next_one_takes_over_its_claims(
    place: Place,
    configure: Configure,
    prepared: Prepare,
    still_pending: Pending,
    clock: ManualClock,
    admin: Connection,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    configure(artifacts=place.settings())
    prepared("may/1", place=place)
    take, asleep = Claims.take, [True]

    def take_and_sleep(self: Claims, chosen: Sequence[Entry]) -> list[Entry]:
        claimed = take(self, chosen)
        if asleep:
            asleep.clear()
            # A minute passes: for its heartbeat, and for how long ago it thinks that was.
            with admin.cursor() as cursor:
                cursor.execute(f"UPDATE {Run._meta.schema}.runs SET heartbeat_at = heartbeat_at - interval '61 s'")
            monotonic = time.monotonic
            monkeypatch.setattr(time, "monotonic", lambda: monotonic() + 61)
            assert perform(sweep, clock=clock).counts["total_deleted_stale_entries"] == 1, "it takes them over"
            place.put("may/1")  # by whoever uses the path again
        return claimed

    monkeypatch.setattr(Claims, "take", take_and_sleep)
    result = perform(sweep, clock=clock)

    assert (result.outcome, result.reason) == ("lost_lease", "taken_over")
    assert (place.paths(), still_pending()) == ({"may/1"}, set())


def test_a_run_that_lost_its_claim_removes_nothing_and_reports_nothing(
    prepared: Prepare, pending: redis.Redis, still_pending: Pending, settings: Settings
) -> None:
    prepared("may/1")
    value: Any = pending.hget(entries.KEY, "artifacts:may/1")
    entry = Entry(b"artifacts:may/1", value)
    asleep = Claims(THREE_HOURS)
    asleep.take([entry])
    pending.set(f"{settings.namespace}:upload_claim:artifacts:may/1", "another's")

    ends = asleep.settle([entry], [])

    assert (ends.removed, ends.lost) == ([], [])
    assert still_pending() == {"may/1"}


def test_claims_end_by_themselves(prepared: Prepare, pending: redis.Redis, settings: Settings) -> None:
    prepared("may/1", "may/2")
    found: Any = pending.hgetall(entries.KEY)
    both = [Entry(field, value) for field, value in found.items()]
    ours = Claims(timedelta(minutes=6))
    ours.take(both)
    ours.settle(both[:1], both[1:])

    keys: Any = list(pending.scan_iter(match=f"{settings.namespace}:upload_claim:*"))

    assert len(keys) == 1, "the one whose object may still be there"
    assert 0 < int(pending.ttl(keys[0])) <= claims._KEPT.total_seconds()
