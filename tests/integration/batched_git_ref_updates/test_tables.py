"""What the statements cost, and that they are the same on tables shaped like an installation's own."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import peewee
import pytest
import redis
from psycopg2.extensions import connection as Connection

from housekeeping.foundation.db import Database, connect_to, database
from housekeeping.foundation.errors import IllegalEvent, SettingsError
from housekeeping.foundation.settings import Settings
from housekeeping.sweeps.actor import register
from housekeeping.sweeps.plan import dry_run, plan
from housekeeping.sweeps.run import perform
from housekeeping.testing import ManualClock
from housekeeping.workers.batched_git_ref_updates import worker
from housekeeping.workers.batched_git_ref_updates.cleanup import _unchanged, mark_processed, pending_rows
from housekeeping.workers.batched_git_ref_updates.models import Deletion, machine
from housekeeping.workers.batched_git_ref_updates.repositories import hashed_path
from housekeeping.workers.batched_git_ref_updates.scheduling import count_pending_projects, pending_projects
from housekeeping.workers.batched_git_ref_updates.worker import cleanup_scheduler, project_cleanup
from tests.integration.batched_git_ref_updates.conftest import AddDeletions, Pending
from tests.integration.batched_git_ref_updates.repositories import MakeRepository
from tests.integration.middleware.applications import close_all, installed, queued

PARTITIONED = """
CREATE SEQUENCE batched_git_ref_updates_deletions_id_seq;
CREATE TABLE p_batched_git_ref_updates_deletions (
    id bigint DEFAULT nextval('batched_git_ref_updates_deletions_id_seq') NOT NULL,
    project_id bigint NOT NULL,
    partition_id bigint DEFAULT 1 NOT NULL,
    created_at timestamp with time zone DEFAULT now() NOT NULL,
    updated_at timestamp with time zone DEFAULT now() NOT NULL,
    status smallint DEFAULT 1 NOT NULL,
    ref text NOT NULL,
    note text,
    PRIMARY KEY (id, partition_id),
    CONSTRAINT check_ref CHECK (char_length(ref) <= 1024)
) PARTITION BY LIST (partition_id);
CREATE TABLE batched_git_ref_updates_deletions_1 PARTITION OF p_batched_git_ref_updates_deletions FOR VALUES IN (1);
CREATE TABLE batched_git_ref_updates_deletions_2 PARTITION OF p_batched_git_ref_updates_deletions FOR VALUES IN (2);
CREATE INDEX on_project_id_pending ON p_batched_git_ref_updates_deletions (project_id, id) WHERE status = 1;
"""
INDEX = "index_batched_git_ref_updates_deletions_on_project_id_pending"


@pytest.fixture
def partitioned(unbound: None, admin: Connection) -> None:
    with admin.cursor() as cursor:
        cursor.execute(PARTITIONED)
    Deletion._meta.set_table_name("p_batched_git_ref_updates_deletions")


@pytest.fixture
def in_another_zone(settings: Settings, partitioned: None) -> Iterator[None]:
    """A session whose time zone is not UTC, by the URL's options."""
    assert settings.database_url is not None
    before = database.obj
    other = connect_to(f"{settings.database_url}%20-ctimezone%3DAsia/Tokyo")
    database.initialize(other)
    yield
    other.close()
    database.initialize(before)


@pytest.fixture
def explained(postgres: Database, monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], Any]], list[str]]:
    """The plans of the very statements a function sends."""

    def explain(function: Callable[[], Any]) -> list[str]:
        sent: list[tuple[str, Any]] = []
        execute_sql = Database.execute_sql

        def note(self: Database, sql: str, params: Any = None) -> Any:
            sent.append((sql, params))
            return execute_sql(self, sql, params)

        with monkeypatch.context() as noting:
            noting.setattr(Database, "execute_sql", note)
            with postgres.atomic() as undone:
                function()
                undone.rollback()
        return [
            "\n".join(row[0] for row in postgres.execute_sql(f"EXPLAIN ANALYZE {sql}", params))
            for sql, params in sent
            if sql.startswith(("SELECT", "WITH", "UPDATE"))
        ]

    return explain


def fill(admin: Connection, add_deletions: AddDeletions) -> None:
    """A table of 60,000 rows, 20,000 of them pending, 10,000 of these of one project."""
    add_deletions(40_000, project="n % 500")
    with admin.cursor() as cursor:
        cursor.execute(f"UPDATE {Deletion._meta.table_name} SET status = 2")
    add_deletions(10_000, project="7")
    add_deletions(10_000, project="n % 2000")
    with admin.cursor() as cursor:
        cursor.execute(f"ANALYZE {Deletion._meta.table_name}")


def test_the_next_projects_are_found_by_one_index_probe_each(
    add_deletions: AddDeletions, admin: Connection, explained: Callable[[Callable[[], Any]], list[str]]
) -> None:
    # データベース操作仕様, パフォーマンス要件: not a DISTINCT over all rows.
    fill(admin, add_deletions)

    for find in (lambda: pending_projects(None, None, 101), lambda: pending_projects(5, 1000, 101)):
        (text,) = explained(find)
        assert INDEX in text
        assert "Seq Scan" not in text
        # 101 projects cost 101 probes, though project 7 alone has 10,000 rows.
        assert re.search(r"rows=1(\.00)? loops=100\b", text), "PostgreSQL 18 counts them as 1.00"


def test_counting_the_projects_is_a_loose_scan_too(
    add_deletions: AddDeletions, admin: Connection, explained: Callable[[Callable[[], Any]], list[str]]
) -> None:
    fill(admin, add_deletions)

    (text,) = explained(lambda: count_pending_projects(10_001))

    assert INDEX in text and "Seq Scan" not in text
    assert count_pending_projects(10_001) == 2000
    assert count_pending_projects(100) == 100


def test_a_projects_rows_are_read_and_marked_by_index(
    add_deletions: AddDeletions,
    admin: Connection,
    clock: ManualClock,
    explained: Callable[[Callable[[], Any]], list[str]],
) -> None:
    fill(admin, add_deletions)
    rows = pending_rows(7, None, 1000)

    (first,) = explained(lambda: pending_rows(7, None, 1001))
    (later,) = explained(lambda: pending_rows(7, rows[-1][0], 1001))
    (marked,) = explained(lambda: mark_processed(7, rows, clock.now()))

    assert INDEX in first and INDEX in later
    assert "Rows Removed by Filter" not in first + later
    assert all("Seq Scan" not in text for text in (first, later, marked))


def test_marking_does_not_compare_every_row_with_every_other_before_the_table_is_analysed(
    add_deletions: AddDeletions, postgres: Database
) -> None:
    add_deletions(10_000)
    rows = pending_rows(1, None, 1000)

    sql, parameters = _unchanged(1, rows).sql()
    text = "\n".join(row[0] for row in postgres.execute_sql(f"EXPLAIN {sql}", parameters))

    assert "Nested Loop" not in text


def test_a_page_costs_a_read_a_write_and_the_ledgers_line(
    root: Path, add_deletions: AddDeletions, statements: list[str]
) -> None:
    add_deletions(10_000)

    perform(project_cleanup, 1)

    reads = [sql for sql in statements if sql.startswith("SELECT") and '"ref"' in sql]
    marks = [sql for sql in statements if sql.startswith("WITH") and "UPDATE" in sql]
    counts = [sql for sql in statements if sql.startswith("UPDATE") and '"counts"' in sql]
    assert (len(reads), len(marks), len(counts)) == (10, 10, 10)
    savepoints = [sql for sql in statements if "SAVEPOINT" in sql]
    looks = [sql for sql in statements if "pg_inherits" in sql]  # of the gates, which ask by the clock
    assert len(statements) - len(savepoints) - len(looks) - 30 <= 6, (
        "what begins and ends a run does not grow with the pages"
    )


def test_a_batch_of_projects_costs_two_statements(
    settings: Settings, redis_client: redis.Redis, add_deletions: AddDeletions, statements: list[str]
) -> None:
    broker = installed(settings.model_copy(update={"database_url": None}))
    register(broker, project_cleanup)
    add_deletions(1000, project="n")

    perform(cleanup_scheduler)
    close_all()

    scans = [sql for sql in statements if '"further"' in sql and "COUNT(" not in sql]
    counts = [sql for sql in statements if sql.startswith("UPDATE") and '"counts"' in sql]
    assert (len(scans), len(counts)) == (10, 10)
    # Anything else might write, and is preceded by a question whether the server is there.
    assert all(sql.startswith("SELECT") for sql in scans)


def test_partitioned_tables_in_a_session_that_is_not_in_utc_are_cleaned_the_same(
    in_another_zone: None,
    settings: Settings,
    repository: MakeRepository,
    admin: Connection,
    clock: ManualClock,
    redis_client: redis.Redis,
) -> None:
    # workers.md, 58: prefix p_, partitioned by partition_id; the same id may be in two partitions.
    table = Deletion._meta.table_name
    bare = repository(*(f"refs/heads/{name}" for name in ("a", "b", "locked", "kept")))
    bare.lock("refs/heads/locked")
    with admin.cursor() as cursor:
        cursor.execute(
            f"INSERT INTO {table} (id, partition_id, project_id, ref) VALUES "
            "(1, 1, 1, 'refs/heads/a'), (1, 2, 1, 'refs/heads/locked'), (2, 2, 1, 'refs/heads/b'), "
            "(3, 2, 2, 'refs/heads/kept'), (4, 1, 1, 'no ref')"
        )
    broker = installed(settings.model_copy(update={"database_url": None}))
    register(broker, project_cleanup)

    scheduled = perform(cleanup_scheduler)
    result = perform(project_cleanup, 1, clock=clock)

    assert database.execute_sql("SHOW timezone").fetchone()[0] == "Asia/Tokyo"
    assert scheduled.counts == {"total_projects": 2, "enqueued": 2, "deduplicated": 0}
    assert sorted(message.args for message in queued(broker, "git_refs")) == [(1,), (2,)]
    assert result.counts == {"total_deletes": 2, "invalid": 1, "failed": 1}
    assert bare.refs() == ["refs/heads/kept", "refs/heads/locked"]
    with admin.cursor() as cursor:
        cursor.execute(
            f"SELECT id, partition_id, status, updated_at = '2026-01-01 00:00:00+00' FROM {table} ORDER BY id, ref"
        )
        assert cursor.fetchall() == [
            (1, 1, 2, True),
            (1, 2, 1, False),
            (2, 2, 2, True),
            (3, 2, 1, False),
            (4, 1, 2, True),
        ]
    close_all()


def test_partitioned_tables_are_walked_by_index_too(
    partitioned: None, admin: Connection, explained: Callable[[Callable[[], Any]], list[str]]
) -> None:
    with admin.cursor() as cursor:
        cursor.execute(
            f"INSERT INTO {Deletion._meta.table_name} (partition_id, project_id, ref, status) "
            "SELECT 1 + n % 2, n % 1000, 'refs/heads/' || n, CASE WHEN n % 4 = 0 THEN 1 ELSE 2 END "
            "FROM generate_series(1, 40000) AS n"
        )
        cursor.execute(f"ANALYZE {Deletion._meta.table_name}")

    plans = explained(lambda: pending_projects(None, None, 101)) + explained(lambda: pending_rows(4, None, 1001))

    assert len(plans) == 2
    assert all("project_id_id_idx" in text and "Seq Scan" not in text for text in plans)


def test_a_plan_is_what_a_run_would_do_and_changes_nothing(add_deletions: AddDeletions, pending: Pending) -> None:
    add_deletions(12)
    add_deletions(3, "'no ref ' || n")
    add_deletions(5, project="2")

    scheduler, one = plan(cleanup_scheduler), plan(project_cleanup, 1)

    assert (scheduler.stale.rows, scheduler.passes[0][0].samples) == (2, [{"project_id": 1}, {"project_id": 2}])
    assert dry_run(cleanup_scheduler).counts == {"total_projects": 2, "enqueued": 0, "deduplicated": 0}
    assert (one.stale.rows, one.passes[0][0].samples[0]) == (15, {"id": 1, "ref": "refs/heads/1"})
    assert dry_run(project_cleanup, 1).counts == {"total_deletes": 12, "invalid": 3, "failed": 0}
    assert len(pending()) == 20
    json.dumps([scheduler.as_json(), one.as_json()])


def test_the_backlog_of_all_projects_is_known_without_an_argument(add_deletions: AddDeletions) -> None:
    # As `housekeeping status` asks.
    add_deletions(12, project="n % 3")
    (projects,), (rows,) = cleanup_scheduler.walks(), project_cleanup.walks()
    now = ManualClock().now()

    assert (projects.backlog(now, 100).rows, rows.backlog(now, 100).rows) == (3, 12)
    assert rows.backlog(now, 11).exact is False
    assert (projects.oldest(now), rows.oldest(now)) == (None, None)


@pytest.mark.parametrize(
    ("name", "given"),
    [
        (cleanup_scheduler.name, {"schedule": "*/5 * * * *", "batch_size": 10, "max_projects": 50, "lease_ttl_s": 900}),
        (project_cleanup.name, {"page_size": 10, "git_batch_size": 5, "max_deletes": 30, "max_runtime_s": 60}),
    ],
)
def test_the_settings_of_workers_md_are_taken(
    settings: Settings, unbound: None, name: str, given: dict[str, Any]
) -> None:
    chosen = Settings.load(**{**settings.model_dump(exclude={"workers"}), "workers": {name: given}})
    (sweep,) = [sweep for sweep in worker.SWEEPS if sweep.name == name]

    configured = sweep.configured(chosen.workers[name])

    sizes = {key: value for key, value in given.items() if key in configured.options}
    assert {key: configured.options[key] for key in sizes} == sizes
    assert configured.schedule == given.get("schedule", sweep.schedule)
    assert configured.batch_size == given.get("batch_size", sweep.batch_size)


@pytest.mark.parametrize(
    ("name", "given", "says"),
    [
        (cleanup_scheduler.name, {"max_deletes": 5}, "max_deletes"),
        (cleanup_scheduler.name, {"stale_after_s": 5}, "stale_after_s"),
        (cleanup_scheduler.name, {"max_runtime_s": 600}, "max_runtime must be below"),
        (project_cleanup.name, {"max_projects": 5}, "max_projects"),
        (project_cleanup.name, {"log_records": True}, "log_records"),
        (project_cleanup.name, {"batch_size": 5}, "page_size"),
    ],
)
def test_settings_without_a_use_are_refused(
    settings: Settings, unbound: None, name: str, given: dict[str, Any], says: str
) -> None:
    chosen = Settings.load(**{**settings.model_dump(exclude={"workers"}), "workers": {name: given}})
    (sweep,) = [sweep for sweep in worker.SWEEPS if sweep.name == name]

    with pytest.raises(SettingsError, match=says):
        sweep.configured(chosen.workers[name])
        worker.configure(chosen)


def test_a_repository_lies_where_its_projects_hash_says() -> None:
    # workers.md, 58
    digest = "6b86b273ff34fce19d6b804eff5a3f5747ada4eaa22f1d49c01e52ddb7875b4b"

    assert str(hashed_path(1)) == f"@hashed/6b/86/{digest}.git"


def test_a_single_record_can_be_processed_once(deletions: type[Deletion], clock: ManualClock) -> None:
    record = Deletion.create(project_id=1, ref="refs/heads/a")

    record.process(clock.now())

    assert (Deletion.get().status, Deletion.get().updated_at) == (2, clock.now())
    with pytest.raises(IllegalEvent, match="processed: process is allowed from pending only"):
        record.process(clock.now())
    assert (machine.events, machine.sources("process"), machine.target("process")) == (["process"], [1], 2)


def test_a_ref_of_1024_characters_fits_and_a_longer_one_does_not(deletions: type[Deletion]) -> None:
    # workers.md, 58
    Deletion.create(project_id=1, ref="refs/" + "x" * 1019)

    with pytest.raises(peewee.DataError):
        Deletion.create(project_id=1, ref="refs/" + "x" * 1020)
