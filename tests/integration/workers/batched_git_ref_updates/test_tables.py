"""Table of deletions: single records, and tables with an installation's own structure."""

from __future__ import annotations

import peewee
import pytest
from psycopg2.extensions import connection as Connection

from housekeeping.workers.batched_git_ref_updates.models import Deletion, machine
from tests.integration.workers.batched_git_ref_updates.conftest import Explained
from tests.internals.core import IllegalEvent
from tests.internals.database import database_now
from tests.internals.workers import pending_projects, pending_rows

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


def test_a_single_record_can_be_processed_once(deletions: type[Deletion]) -> None:
    record = Deletion.create(project_id=1, ref="refs/heads/a")

    before = database_now()

    record.process()

    assert (Deletion.get().status, before <= Deletion.get().updated_at <= database_now()) == (2, True)
    with pytest.raises(IllegalEvent, match="processed: process is allowed from pending only"):
        record.process()
    assert (machine.events, machine.sources("process"), machine.target("process")) == (["process"], [1], 2)


def test_a_ref_of_1024_characters_fits_and_a_longer_one_does_not(deletions: type[Deletion]) -> None:
    # document 58
    Deletion.create(project_id=1, ref="refs/" + "x" * 1019)

    with pytest.raises(peewee.DataError):
        Deletion.create(project_id=1, ref="refs/" + "x" * 1020)
