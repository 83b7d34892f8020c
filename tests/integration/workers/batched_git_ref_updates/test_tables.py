"""Table of deletions: single records, and tables with an installation's own structure."""

from __future__ import annotations

from collections.abc import Iterator

import peewee
import pytest
import redis
from psycopg2.extensions import connection as Connection

from housekeeping.core.errors import IllegalEvent
from housekeeping.core.settings import Settings
from housekeeping.database.connection import connect_to, database
from housekeeping.sweeps.engine.runner import run_sweep
from housekeeping.sweeps.registration import register
from housekeeping.testing import ManualClock
from housekeeping.workers.batched_git_ref_updates.models import Deletion, machine
from housekeeping.workers.batched_git_ref_updates.pending import pending_rows
from housekeeping.workers.batched_git_ref_updates.scheduling import pending_projects
from housekeeping.workers.batched_git_ref_updates.worker import cleanup_scheduler, project_cleanup
from tests.database_times import DatabaseTimes
from tests.integration.middleware.applications import close_all, installed, queued
from tests.integration.workers.batched_git_ref_updates.conftest import Explained
from tests.integration.workers.batched_git_ref_updates.repositories import MakeRepository

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


def test_partitioned_tables_are_cleaned_in_any_time_zone(
    in_another_zone: None,
    settings: Settings,
    repository: MakeRepository,
    admin: Connection,
    times: DatabaseTimes,
    redis_client: redis.Redis,
) -> None:
    # document 58: prefix p_, partitioned by partition_id; the same id may be in two partitions.
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

    scheduled = run_sweep(cleanup_scheduler)
    times.note()
    result = run_sweep(project_cleanup, 1)

    assert database.execute_sql("SHOW timezone").fetchone()[0] == "Asia/Tokyo"
    assert scheduled.counts == {"total_projects": 2, "enqueued": 2, "deduplicated": 0}
    assert sorted(message.args for message in queued(broker, "git_refs")) == [(1,), (2,)]
    assert result.counts == {"total_deletes": 2, "invalid": 1, "failed": 1}
    assert bare.refs() == ["refs/heads/kept", "refs/heads/locked"]
    with admin.cursor() as cursor:
        cursor.execute(
            f"SELECT id, partition_id, status, updated_at BETWEEN %s AND now() FROM {table} ORDER BY id, ref",
            (times.noted[-1],),
        )
        assert cursor.fetchall() == [
            (1, 1, 2, True),
            (1, 2, 1, False),
            (2, 2, 2, True),
            (3, 2, 1, False),
            (4, 1, 2, True),
        ]
    close_all()


def test_partitioned_tables_are_read_by_index(partitioned: None, admin: Connection, explained: Explained) -> None:
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


def test_a_single_record_can_be_processed_once(deletions: type[Deletion], clock: ManualClock) -> None:
    record = Deletion.create(project_id=1, ref="refs/heads/a")

    record.process(clock.now())

    assert (Deletion.get().status, Deletion.get().updated_at) == (2, clock.now())
    with pytest.raises(IllegalEvent, match="processed: process is allowed from pending only"):
        record.process(clock.now())
    assert (machine.events, machine.sources("process"), machine.target("process")) == (["process"], [1], 2)


def test_single_record_has_the_databases_time_of_its_change(deletions: type[Deletion], times: DatabaseTimes) -> None:
    record = Deletion.create(project_id=1, ref="refs/heads/a")

    record.process()
    times.note()

    assert (times.batch_of(record.updated_at), Deletion.get().updated_at) == (0, record.updated_at)


def test_a_ref_of_1024_characters_fits_and_a_longer_one_does_not(deletions: type[Deletion]) -> None:
    # document 58
    Deletion.create(project_id=1, ref="refs/" + "x" * 1019)

    with pytest.raises(peewee.DataError):
        Deletion.create(project_id=1, ref="refs/" + "x" * 1020)
