"""Restores that are killed at every point, and one of a million rows."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

import pytest
import redis

from housekeeping import Sweep
from housekeeping.testing.points import Ended, run_in_process
from housekeeping.testing.stubs import ManualClock
from tests.integration.archives import tickets
from tests.integration.archives.tickets import leased, rows, sweep, value
from tests.internals.core import shared_redis
from tests.internals.database import database
from tests.internals.engine import restoration_of, run_sweep
from tests.internals.leases import RedisLeaseStore
from tests.internals.ledger import NOW as DATABASE_NOW
from tests.internals.ledger import Run, operators, runs
from tests.session_settings import NEEDS_SESSION

#: Many processes, or many rows.
pytestmark = pytest.mark.slow

CLOCK = ManualClock(tickets.NOW)
MILLION = 1_000_000


def restore(of: Sweep, run_id: int) -> str:
    return restoration_of(of, run_id).carry_out(pause=True).outcome


def in_one_table_each() -> bool:
    """Return whether each of the seven tickets is in exactly one of the two tables."""
    found = value(
        "SELECT array_agg(id ORDER BY id) FROM (SELECT id FROM ticket UNION ALL SELECT id FROM old_tickets) t"
    )
    return bool(found == [1, 2, 3, 4, 5, 6, 7])


def killed_at_each_point(of: Sweep) -> Iterator[Ended]:
    """Archive, then kill a restore before each of its points; yield what is there then."""
    alive = random.getrandbits(62)
    for number in itertools.count():
        operators.resume(of.name)
        run_id = run_sweep(of, clock=CLOCK).run_id
        assert run_id is not None
        ended = run_in_process(lambda run=run_id: restore(of, run), number, alive)  # type: ignore[misc]
        # The server has noticed that the process is gone.
        database.execute_sql("SELECT pg_advisory_lock(%s), pg_advisory_unlock(%s)", (alive, alive))
        yield ended
        Run.update(heartbeat_at=DATABASE_NOW - 2 * runs.SILENCE).where(Run.outcome.is_null()).execute()
        store = RedisLeaseStore(shared_redis.get(), shared_redis.namespace)
        if (owner := store.owner(of.name)) is not None:
            store.release(of.name, owner)
        assert restore(of, run_id) == "done"
        if not ended.killed:
            return


@NEEDS_SESSION
@pytest.mark.parametrize("of", [sweep(), leased()], ids=["paused", "leased"])
def test_killed_restore_leaves_each_row_in_one_table(archive: None, housekeeping_redis: redis.Redis, of: Sweep) -> None:
    before, points = rows(), []

    for ended in killed_at_each_point(of):
        points = ended.points
        assert in_one_table_each(), ended.points[-1]

    assert rows() == before and rows("old_tickets") == []
    assert sum('INSERT INTO "ticket"' in point for point in points) == 2, "the third one is prepared"


@NEEDS_SESSION
@pytest.mark.parametrize("of", [sweep(), leased()], ids=["paused", "leased"])
def test_sweep_stays_paused_after_the_first_restored_row(
    archive: None, housekeeping_redis: redis.Redis, of: Sweep
) -> None:
    for _ in killed_at_each_point(of):
        override = operators.override_of(of.name)
        assert value("SELECT count(*) FROM old_tickets") == 5 or (override is not None and override.state == "paused")


def test_million_rows_are_restored_exactly(postgres: object) -> None:
    tickets.create()
    tickets.fill(MILLION, 1000)
    of = sweep(batch=5000)
    tickets.create_archives(of)
    digest = "SELECT md5(string_agg(md5(t::text), '' ORDER BY id)) FROM ticket AS t"
    before = value(digest)
    run = run_sweep(of, clock=CLOCK)
    assert run.run_id is not None and run.counts["archived_rows"] == MILLION and value(digest) != before

    result = restoration_of(of, run.run_id).carry_out(pause=True)

    assert (result.outcome, result.counts["restored"], result.counts["conflicts"]) == ("done", MILLION, 0)
    assert value(digest) == before and value("SELECT count(*) FROM old_tickets") == 0
