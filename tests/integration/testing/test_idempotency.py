"""What `assert_idempotent` finds, and what it lets pass."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest

from housekeeping.core.errors import Refused
from housekeeping.database.connection import Database, database
from housekeeping.testing import assert_idempotent
from tests.integration.testing.sessions import (
    NO_CASCADE,
    NOW,
    Count,
    Note,
    Session,
    appended_to,
    archived,
    contents,
    replaced_in,
    sweep,
)


def test_a_sweep_that_deletes_is_idempotent_and_leaves_its_work_done(sessions: type[Session]) -> None:
    assert_idempotent(sweep(), now=NOW)

    assert (sessions.select().count(), Note.select().count()) == (2, 2)


def test_a_second_run_that_changes_rows_is_shown_with_the_rows(sessions: type[Session]) -> None:
    with pytest.raises(AssertionError) as caught:
        assert_idempotent(sweep(Count()), now=NOW)

    said = str(caught.value)
    assert said.startswith("sessions.expired is not idempotent: a second run over the same rows changed\n")
    assert "  table session:\n" in said and "  table note:" not in said
    assert '    - {"id": 1, "seen": 1, ' in said and '    + {"id": 1, "seen": 2, ' in said
    assert "counts of the second run are {'deleted_rows': 3}, those of the first are {'deleted_rows': 3}" in said


def test_what_is_to_be_ignored_is(sessions: type[Session]) -> None:
    with pytest.raises(AssertionError) as caught:
        assert_idempotent(sweep(Count()), now=NOW, ignoring=["seen"])

    assert "table" not in str(caught.value).replace("tables", ""), "the ledger alone is wrong then"


def test_a_first_run_that_finds_nothing_proves_nothing(sessions: type[Session]) -> None:
    with pytest.raises(AssertionError, match="changed nothing, which proves nothing; put stale rows into its tables"):
        assert_idempotent(sweep(), now=NOW - timedelta(days=1))


def test_rows_that_could_not_be_settled_are_told_from_no_rows_at_all(sessions: type[Session]) -> None:
    database.execute_sql(NO_CASCADE)

    with pytest.raises(AssertionError, match="changed nothing, which proves nothing: 3 rows failed"):
        assert_idempotent(sweep(), now=NOW)


def test_a_run_that_fails_says_why(sessions: type[Session]) -> None:
    def fail(session: Session) -> None:
        raise ConnectionRefusedError("the archive is closed")

    with pytest.raises(AssertionError, match=r"sessions\.expired: the run ended as failed: .*the archive is closed"):
        assert_idempotent(archived(fail), now=NOW)


def test_effects_outside_of_the_database_are_compared(sessions: type[Session], tmp_path: Path) -> None:
    assert_idempotent(archived(replaced_in(tmp_path)), now=NOW, outside=lambda: contents(tmp_path))

    assert contents(tmp_path) == {"1.txt": "1\n", "2.txt": "2\n", "3.txt": "3\n"}


def test_an_effect_for_rows_that_stay_is_found(sessions: type[Session], tmp_path: Path) -> None:
    file = tmp_path / "archive"
    write = appended_to(file)

    def write_and_fail(session: Session) -> None:
        write(session)
        raise ValueError("the row stays")

    with pytest.raises(AssertionError, match="outside, after the second: {'archive': '1\\\\n2\\\\n3\\\\n1\\\\n2"):
        assert_idempotent(archived(write_and_fail), now=NOW, outside=lambda: contents(tmp_path))


def test_an_open_transaction_is_refused(sessions: type[Session]) -> None:
    with database.atomic(), pytest.raises(Refused, match="a transaction is open on the library's connection"):
        assert_idempotent(sweep(), now=NOW)


def test_tables_with_more_rows_than_a_test_has_are_refused(
    sessions: type[Session], housekeeping_database: Database
) -> None:
    housekeeping_database.execute_sql(
        "INSERT INTO session (expires_at, seen) SELECT now(), 0 FROM generate_series(1, 10000)"
    )

    with pytest.raises(Refused, match="session has more than 10,000 rows: this is for a few rows"):
        assert_idempotent(sweep(), now=NOW)


def test_without_a_database_the_way_out_is_shown() -> None:
    with pytest.raises(Refused, match="use the fixture housekeeping_database"):
        assert_idempotent(sweep(), now=NOW)
