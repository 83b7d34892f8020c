"""Sweeps that `assert_survives_kill` accepts and rejects."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

import psycopg2
import pytest
import redis
from peewee import InternalError

from housekeeping import Delete, Lease
from housekeeping.testing.assertions import assert_idempotent, assert_survives_kill
from tests.integration.testing.sessions import (
    NO_CASCADE,
    NOW,
    Note,
    Session,
    appended_to,
    archived,
    contents,
    early,
    empty,
    forgetful,
    overtaken,
    replaced_in,
    sweep,
)
from tests.internals.core import Refused
from tests.internals.database import Database
from tests.internals.ledger import Run
from tests.session_settings import NEEDS_SESSION

#: Starts many processes.
pytestmark = [pytest.mark.slow, NEEDS_SESSION]


def test_run_is_killed_at_each_statement_and_tables_restored(sessions: type[Session]) -> None:
    Run.create(worker="another", trigger="cli", started_at=NOW, heartbeat_at=NOW)

    points = assert_survives_kill(sweep(), now=NOW)

    deletions = [number for number, point in enumerate(points) if point.startswith('WITH ... DELETE FROM "session", ')]
    assert len(deletions) == 2, "a batch of two, and one of one"
    assert not any("COMMIT" in point for point in points[slice(*deletions)]), "each is a transaction of its own"
    assert (sessions.select().count(), Note.select().count()) == (5, 5)
    assert [run.worker for run in Run.select().order_by(Run.id)][0] == "another", "nor is the ledger of before touched"


def test_lease_of_the_killed_run_is_released(sessions: type[Session], housekeeping_redis: redis.Redis) -> None:
    leased = sweep(lease=Lease("sessions", timedelta(minutes=10)))

    points = assert_survives_kill(leased, now=NOW)

    first, *_, last = [number for number, point in enumerate(points) if point == "Redis: EVALSHA"]
    assert first < points.index("COMMIT") < last, "taken before the run begins, given back at its end"
    redis_points = {point for point in points if point.startswith("Redis: ")}
    # An earlier test may have loaded the scripts.
    assert redis_points - {"Redis: SCRIPT"} == {"Redis: EVALSHA"}, "commands of a new connection are not points"


def test_lost_effect_is_reported_with_its_point(sessions: type[Session]) -> None:
    with pytest.raises(AssertionError) as caught:
        assert_survives_kill(early(), now=NOW)

    said = str(caught.value)
    assert said.startswith("sessions.early does not survive a kill at point ")
    assert '  killed after:  UPDATE "session" SET "seen" = ("session"."seen" + %s)' in said
    assert "  killed before: WITH ... DELETE FROM" in said
    assert '    - {"id": 4, "seen": 2, ' in said and '    + {"id": 4, "seen": 3, ' in said


def test_commit_without_counts_is_found(sessions: type[Session]) -> None:
    with pytest.raises(
        AssertionError,
        match="counts are {'deleted_rows': 1} in total, those of an uninterrupted run are {'deleted_rows': 3}",
    ):
        assert_survives_kill(forgetful(), now=NOW)


def test_cursor_beyond_unprocessed_rows_is_found(sessions: type[Session]) -> None:
    with pytest.raises(AssertionError, match=r"does not survive a kill at point") as caught:
        assert_survives_kill(overtaken(), now=NOW)

    assert "  table session:\n    + {" in str(caught.value), "rows that an uninterrupted run deletes are still there"


def test_wrong_counts_are_found(sessions: type[Session], housekeeping_database: Database) -> None:
    housekeeping_database.execute_sql(
        "CREATE FUNCTION count_one_more() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN NEW.counts = "
        "jsonb_set(NEW.counts::jsonb, '{deleted_rows}', '4'); RETURN NEW; END $$;"
        f"CREATE TRIGGER count_one_more BEFORE UPDATE ON {Run._meta.schema}.runs FOR EACH ROW "
        "WHEN (NEW.finished_at IS NOT NULL) EXECUTE FUNCTION count_one_more()"
    )

    with pytest.raises(AssertionError, match="deleted_rows is 4 in the ledger, but 3 rows changed"):
        assert_survives_kill(archived(lambda row: None), now=NOW)


@pytest.fixture
def archive_schema(housekeeping_database: Database) -> Iterator[str]:
    """Schema that is not in the search path."""
    name = f"archive_{uuid4().hex}"
    housekeeping_database.execute_sql(f"CREATE SCHEMA {name}")
    yield name
    housekeeping_database.execute_sql(f"DROP SCHEMA {name} CASCADE")


@pytest.mark.parametrize(("in_path", "partitioned"), [(True, False), (False, True)])
def test_archived_rows_survive_kills(
    sessions: type[Session], housekeeping_database: Database, archive_schema: str, in_path: bool, partitioned: bool
) -> None:
    archive = "old_sessions" if in_path else f"{archive_schema}.old_sessions"
    partitions = " PARTITION BY RANGE (archived_at)" if partitioned else ""
    housekeeping_database.execute_sql(
        f"CREATE TABLE {archive} (LIKE session, archived_at timestamptz NOT NULL, archived_by_run bigint){partitions}"
    )
    if partitioned:
        housekeeping_database.execute_sql(f"CREATE TABLE {archive}_1 PARTITION OF {archive} DEFAULT")
    archiving = sweep(Delete(archive_to=archive))

    points = assert_survives_kill(archiving, now=NOW)

    assert len(points) > 3
    assert housekeeping_database.execute_sql(f"SELECT count(*) FROM {archive}").fetchone() == (0,), "restored"
    assert_idempotent(archiving, now=NOW)


def test_repeated_append_to_a_file_is_found(sessions: type[Session], tmp_path: Path) -> None:
    file = tmp_path / "archive"

    def restore() -> None:
        file.unlink(missing_ok=True)

    with pytest.raises(AssertionError, match=r"(?s)killed after:  open .*archive.*outside: {'archive': "):
        assert_survives_kill(archived(appended_to(file)), now=NOW, outside=lambda: contents(tmp_path), restore=restore)


def test_atomically_replaced_files_survive_kills(sessions: type[Session], tmp_path: Path) -> None:
    points = assert_survives_kill(
        archived(replaced_in(tmp_path)),
        now=NOW,
        outside=lambda: contents(tmp_path),
        restore=functools.partial(empty, tmp_path),
    )

    assert [point.split()[0] for point in points if str(tmp_path) in point] == ["open", "os.rename"] * 3


def test_nondeterministic_sweep_is_reported_as_such(sessions: type[Session], housekeeping_database: Database) -> None:
    housekeeping_database.execute_sql(
        "CREATE FUNCTION note_it() RETURNS trigger LANGUAGE plpgsql AS "
        "$$ BEGIN UPDATE session SET seen = (random() * 1000000)::int WHERE id = 5; RETURN OLD; END $$;"
        "CREATE TRIGGER note_it AFTER DELETE ON session FOR EACH ROW EXECUTE FUNCTION note_it()"
    )

    with pytest.raises(AssertionError, match="differs between two uninterrupted runs.* `ignoring`"):
        assert_survives_kill(sweep(), now=NOW)
    assert assert_survives_kill(sweep(), now=NOW, ignoring=["seen"])


def test_run_without_work_fails(sessions: type[Session]) -> None:
    with pytest.raises(AssertionError, match="changed nothing, which proves nothing"):
        assert_survives_kill(sweep(), now=NOW - timedelta(days=1))


def test_failed_rows_are_reported(sessions: type[Session], housekeeping_database: Database) -> None:
    housekeeping_database.execute_sql(NO_CASCADE)

    with pytest.raises(AssertionError, match="changed nothing, which proves nothing: 3 rows failed"):
        assert_survives_kill(sweep(), now=NOW)


def test_tables_of_every_kind_are_restored(housekeeping_database: Database) -> None:
    housekeeping_database.execute_sql(
        "CREATE TABLE session (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, expires_at timestamptz NOT NULL,"
        " seen int DEFAULT 0, twice int GENERATED ALWAYS AS (seen * 2) STORED, parent bigint REFERENCES session);"
        "CREATE TABLE a_note (session_id bigint REFERENCES session ON DELETE CASCADE, raw bytea, day date);"
        'CREATE TABLE "odd Name" ("a b" json, n numeric) PARTITION BY RANGE (n);'
        'CREATE TABLE odd_part PARTITION OF "odd Name" FOR VALUES FROM (0) TO (10);'
        "INSERT INTO session (expires_at, parent) VALUES ('2027-01-01', 1), ('2026-01-01', 1), ('2026-01-01', 1);"
        "INSERT INTO a_note VALUES (2, '\\x0001', 'infinity'), (2, NULL, NULL), (2, NULL, NULL);"
        'INSERT INTO "odd Name" VALUES (\'{"a":  1}\', 1.50);'
        "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE 'not by hand'; END $$;"
        "CREATE TRIGGER refuse BEFORE INSERT ON session FOR EACH ROW EXECUTE FUNCTION refuse()"
    )
    before = contents_of_all(housekeeping_database)

    assert_survives_kill(sweep(), now=NOW)

    assert contents_of_all(housekeeping_database) == before
    with pytest.raises(InternalError, match="not by hand"):
        sessions_by_hand(housekeeping_database)


def contents_of_all(database: Database) -> list[Any]:
    tables = ("session", "a_note", '"odd Name"')
    return [database.execute_sql(f"SELECT t::text FROM {table} AS t ORDER BY 1").fetchall() for table in tables]


def sessions_by_hand(database: Database) -> None:
    database.execute_sql("INSERT INTO session (expires_at) VALUES (now())")


def test_lock_held_by_the_test_is_named(sessions: type[Session], housekeeping_database: Database) -> None:
    options = housekeeping_database.connect_params["options"]
    housekeeping_database.connect_params["options"] = f"{options} -c lock_timeout=50"
    holder = psycopg2.connect(dbname=housekeeping_database.database, **housekeeping_database.connect_params)
    holder.cursor().execute("SELECT * FROM session FOR UPDATE")

    with pytest.raises(Refused, match="the tables are locked: a session of this test has an open transaction"):
        assert_survives_kill(sweep(), now=NOW)

    holder.close()
