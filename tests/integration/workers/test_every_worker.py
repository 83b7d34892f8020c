"""What the engine promises for each of the five built-in workers, whatever happens to a run.

Each test lets a worker run without a fault first, and then with one over the same records with other ids. After the
next run, the records that are left and the sums of the counts must be the same.
"""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import pytest
import redis
from psycopg2.extensions import connection as Connection

from housekeeping import ExclusiveLease, Settings, Sweep
from housekeeping.testing.stubs import ManualClock
from tests.chaos.families import BUILDS, FIVE, FOUR, IMPORTS, REFS, STATUSES, UPLOADS, Family, Place, State
from tests.declarations import changed
from tests.integration.conftest import Locked
from tests.internals.core import DatabaseUnavailable, RedisUnavailable, shared_redis
from tests.internals.core import redis_client as client_for
from tests.internals.database import Database, connect_to, database, restore_declared_key
from tests.internals.engine import RunResult, run_sweep
from tests.internals.insight import dry_run, plan
from tests.internals.ledger import Counts, Run
from tests.internals.workers import backends, configured_sweeps, pending_entry, stores

#: Counts that differ between one run and several.
_PER_RUN: Final = {"batches", "total_pending_entries"}
LEASED: Final = (REFS, BUILDS)


@dataclass
class Work:
    """Worker with its records, which are filled in rounds."""

    family: Family
    sweep: Sweep
    place: Place

    @property
    def lease(self) -> ExclusiveLease:
        assert self.sweep.lease is not None
        [argument] = self.family.arguments(2) or [None]
        return ExclusiveLease(self.sweep.lease.key_for(argument), self.sweep.lease.ttl)

    def run(self, round: int = 2, **options: Any) -> RunResult:
        return run_sweep(options.pop("sweep", self.sweep), *self.family.arguments(round), confirmed=True, **options)

    def fill(self) -> State:
        """Fill a round and return its records."""
        self.family.fill(self.place, 2)
        return self.left()

    def fault_free(self) -> tuple[State, Counter[str]]:
        """Fill and process one round; return what is left of it and its counts. Fill another one, which is left."""
        self.family.fill(self.place, 1)
        result = self.run(1)
        assert (result.outcome, result.reason) == ("done", None)
        expected = self.left(1), counted(result)
        self.fill()
        return expected

    def left(self, round: int = 2) -> State:
        return self.family.left(self.place, round)


def counted(*results: RunResult) -> Counter[str]:
    """Return the sums of the counts of rows."""
    total: Counter[str] = Counter()
    for result in results:
        rows = {name: value for name, value in result.counts.items() if not isinstance(value, bool) and value}
        total.update({name: value for name, value in rows.items() if name not in _PER_RUN})
    return total


@pytest.fixture
def work(
    request: pytest.FixtureRequest,
    postgres: Database,
    redis_client: redis.Redis,
    admin: Connection,
    settings: Settings,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Work]:
    family: Family = request.param
    monkeypatch.setattr(pending_entry, "KEY", f"{settings.namespace}:pending_direct_uploads")
    for folder in ("objects", "repositories/@hashed"):
        (tmp_path / folder).mkdir(parents=True)
    postgres.create_tables(family.models)
    given = Settings.load(
        workers=json.dumps({family.actor: {**family.settings, **({"git_batch_size": 10} if family is REFS else {})}}),
        object_stores=json.dumps({"artifacts": {"url": f"file://{tmp_path}/objects"}}),
        repositories_root=str(tmp_path / "repositories"),
    )
    sweeps = configured_sweeps(given)
    yield Work(family, sweeps[family.actor], Place(admin, redis_client, tmp_path))
    configured_sweeps(Settings.load())
    backends.use_root(None)
    stores.configured.clear()
    for model in family.models:
        restore_declared_key(model)


def of(*families: Family) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("work", families, indirect=True, ids=[family.actor for family in families])


@of(*FIVE)
def test_second_run_changes_nothing(work: Work) -> None:
    # I4
    expected, _ = work.fault_free()
    work.run()

    again = work.run()

    assert (again.outcome, counted(again), work.left()) == ("done", Counter(), expected)


@of(*FOUR)
def test_locked_row_is_left_for_the_next_run_without_waiting(work: Work, locked: Locked) -> None:
    # Had it waited, lock_timeout would have failed the run.
    expected = work.fault_free()
    [table, *_] = work.family.tables
    key = "user_id" if work.family is STATUSES else "id"

    with locked(f"SELECT * FROM {table} WHERE {key} = 2001 FOR UPDATE"):
        first = work.run()
    second = work.run()

    assert [first.outcome, second.outcome] == ["done", "done"]
    assert sum(counted(second).values()) >= 1, "what was locked"
    assert (work.left(), counted(first, second)) == expected


@of(*FOUR)
def test_run_stopped_by_its_time_limit_is_resumed(work: Work) -> None:
    expected = work.fault_free()
    clock = ManualClock(now=datetime.now(UTC), tick=work.sweep.limits.runtime / 2)

    first = work.run(clock=clock)
    second = work.run()

    assert (first.outcome, first.reason, second.outcome) == ("partial", "out_of_time", "done")
    assert counted(first) < expected[1]
    assert (work.left(), counted(first, second)) == expected


@of(*FIVE)
def test_run_stopped_by_a_shutdown_is_resumed(work: Work) -> None:
    expected = work.fault_free()
    stopping = threading.Event()

    first = work.run(stopping=stopping, on_batch=lambda counts: stopping.set())
    second = work.run()

    assert (first.outcome, first.reason, second.outcome) == ("partial", "shutdown", "done")
    assert (work.left(), counted(first, second)) == expected


@of(*FOUR)
def test_lost_connection_costs_the_current_batch_only(work: Work, admin: Connection) -> None:
    expected = work.fault_free()
    [table, *_] = work.family.tables

    def cut(counts: Counts) -> None:
        work.place.do(
            "CREATE OR REPLACE FUNCTION cut() RETURNS trigger LANGUAGE plpgsql AS "
            "$$ BEGIN PERFORM pg_terminate_backend(pg_backend_pid()); RETURN NULL; END $$;"
            f"DROP TRIGGER IF EXISTS cut ON {table};"
            f"CREATE TRIGGER cut BEFORE UPDATE OR DELETE ON {table} EXECUTE FUNCTION cut()"
        )

    first = work.run(on_batch=cut)
    work.place.do(f"DROP TRIGGER cut ON {table}")
    recorded = Run.get_by_id(first.run_id)
    second = work.run()

    assert (first.outcome, recorded.outcome, second.outcome) == ("failed", "failed", "done")
    assert sum(counted(first).values()) == 10, "one batch"
    assert {name: recorded.counts[name] for name in counted(first)} == counted(first)
    assert (work.left(), counted(first, second)) == expected


@of(*FIVE)
def test_unavailable_database_fails_the_run_before_any_change(work: Work, postgres: Database) -> None:
    expected = work.fault_free()
    before = work.left()
    database.initialize(connect_to("postgresql://nobody@127.0.0.1:1/nothing"))

    first = work.run()
    database.initialize(postgres)
    unchanged = work.left()
    second = work.run()

    assert (first.outcome, first.run_id, unchanged) == ("failed", None, before)
    assert str(first.reason).startswith("database: ")
    with pytest.raises(DatabaseUnavailable):
        first.raise_for_failure()
    assert (work.left(), counted(second)) == expected


@of(*LEASED, UPLOADS)
def test_unavailable_redis_fails_a_run_that_needs_it(work: Work, redis_client: redis.Redis) -> None:
    # L5: an unreachable lease is not a free one.
    expected = work.fault_free()
    before = work.left()
    with client_for("redis://127.0.0.1:1/0") as away:
        shared_redis.use(away, shared_redis.namespace)
        first = work.run()
    shared_redis.use(redis_client, shared_redis.namespace)
    unchanged = work.left()
    second = work.run()

    assert (first.outcome, unchanged) == ("failed", before)
    assert str(first.reason).startswith("Redis did not answer")
    assert Run.get_by_id(first.run_id).outcome == "failed"
    with pytest.raises(RedisUnavailable):
        first.raise_for_failure()
    assert (work.left(), counted(second)) == expected


@of(STATUSES, IMPORTS)
def test_run_without_a_lease_needs_no_redis(work: Work, redis_client: redis.Redis) -> None:
    expected = work.fault_free()

    with client_for("redis://127.0.0.1:1/0") as away:
        shared_redis.use(away, shared_redis.namespace)
        result = work.run()
    shared_redis.use(redis_client, shared_redis.namespace)

    assert (result.outcome, work.left(), counted(result)) == ("done", *expected)


@of(*LEASED)
def test_run_is_skipped_while_its_lease_is_held(work: Work) -> None:
    before = work.fill()

    with work.lease:
        result = work.run()

    assert (result.outcome, result.reason, result.exit_code) == ("skipped", "lease_held", 0)
    assert (work.left(), Run.get_by_id(result.run_id).reason) == (before, "lease_held")


@of(*LEASED)
def test_run_that_lost_its_lease_commits_nothing_more(work: Work) -> None:
    expected = work.fault_free()
    others: list[RunResult] = []

    def overtake(counts: Counts) -> None:
        if not others:
            work.place.redis_client.delete(f"{shared_redis.namespace}:lease:{work.lease.key}")
            others.append(work.run())

    first = work.run(on_batch=overtake)

    assert (first.outcome, others[0].outcome) == ("lost_lease", "done")
    assert (work.left(), counted(first, *others)) == expected


@of(STATUSES, IMPORTS, UPLOADS)
def test_concurrent_runs_process_each_record_once(work: Work, postgres: Database) -> None:
    expected = work.fault_free()
    barrier = threading.Barrier(2)
    results: list[RunResult] = []

    def run() -> None:
        with postgres.connection_context():
            barrier.wait(timeout=10)
            results.append(work.run())

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)

    assert [result.outcome for result in results] == ["done", "done"]
    assert (work.left(), counted(*results)) == expected


@of(IMPORTS, UPLOADS)
def test_disabled_worker_skips_its_run(work: Work) -> None:
    before = work.fill()

    result = work.run(sweep=changed(work.sweep, enabled=False))

    assert (result.outcome, result.reason, work.left()) == ("skipped", "disabled", before)


@of(*FOUR)
def test_row_that_cannot_be_changed_fails_alone(work: Work) -> None:
    expected = work.fault_free()
    [table, *_] = work.family.tables
    key = "user_id" if work.family is STATUSES else "id"
    work.place.do(
        "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS "
        f"$$ BEGIN IF OLD.{key} = 2005 THEN RAISE EXCEPTION 'not this one'; END IF; RETURN coalesce(NEW, OLD); END $$;"
        f"CREATE TRIGGER refuse BEFORE UPDATE OR DELETE ON {table} FOR EACH ROW EXECUTE FUNCTION refuse()"
    )

    first = work.run()
    kept = [row for row in work.left() if row not in expected[0]]
    work.place.do(f"DROP TRIGGER refuse ON {table}")
    second = work.run()

    assert (first.outcome, second.outcome) == ("done", "done")
    assert len(kept) == (2 if work.family is REFS else 1), "the row, and its branch"
    assert (work.left(), counted(first, second)) == (expected[0], expected[1] + Counter(failed=1))


@of(*FIVE)
def test_dry_run_counts_what_the_run_changes_and_changes_nothing(work: Work) -> None:
    before, arguments = work.fill(), work.family.arguments(2)

    planned, dry = plan(work.sweep, *arguments), dry_run(work.sweep, *arguments)
    unchanged = work.left()
    counts = work.run().counts

    rows = sum(counts[name] for name in work.sweep.progress_counts)
    assert (dry.outcome, sum(dry.counts[name] for name in work.sweep.progress_counts)) == ("done", rows)
    assert (planned.stale.rows, unchanged) == (rows, before)
