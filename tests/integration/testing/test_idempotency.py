"""Sweeps that `assert_idempotent` accepts and rejects."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest

from housekeeping.testing.assertions import assert_idempotent
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
from tests.internals.core import Refused
from tests.internals.database import Database, database
from tests.session_settings import NEEDS_SESSION

pytestmark = NEEDS_SESSION


def test_idempotent_sweep_passes_and_keeps_its_changes(sessions: type[Session]) -> None:
    assert_idempotent(sweep(), now=NOW)

    assert (sessions.select().count(), Note.select().count()) == (2, 2)


def test_second_run_that_changes_rows_fails_with_the_rows(sessions: type[Session]) -> None:
    with pytest.raises(AssertionError) as caught:
        assert_idempotent(sweep(Count()), now=NOW)

    said = str(caught.value)
    assert said.startswith("sessions.expired is not idempotent: a second run over the same rows changed\n")
    assert "  table session:\n" in said and "  table note:" not in said
    assert '    - {"id": 1, "seen": 1, ' in said and '    + {"id": 1, "seen": 2, ' in said
    assert "counts of the second run are {'deleted_rows': 3}, those of the first are {'deleted_rows': 3}" in said


def test_ignored_columns_may_differ(sessions: type[Session]) -> None:
    with pytest.raises(AssertionError) as caught:
        assert_idempotent(sweep(Count()), now=NOW, ignoring=["seen"])

    assert "table" not in str(caught.value).replace("tables", ""), "the ledger alone is wrong then"


def test_first_run_without_stale_rows_fails(sessions: type[Session]) -> None:
    with pytest.raises(AssertionError, match="changed nothing, which proves nothing; put stale rows into its tables"):
        assert_idempotent(sweep(), now=NOW - timedelta(days=1))


def test_failed_rows_are_distinguished_from_no_rows(sessions: type[Session]) -> None:
    database.execute_sql(NO_CASCADE)

    with pytest.raises(AssertionError, match="changed nothing, which proves nothing: 3 rows failed"):
        assert_idempotent(sweep(), now=NOW)


def test_failed_run_is_reported_with_its_reason(sessions: type[Session]) -> None:
    def fail(session: Session) -> None:
        raise ConnectionRefusedError("the archive is closed")

    with pytest.raises(AssertionError, match=r"sessions\.expired: the run ended as failed: .*the archive is closed"):
        assert_idempotent(archived(fail), now=NOW)


def test_external_effects_are_compared(sessions: type[Session], tmp_path: Path) -> None:
    assert_idempotent(archived(replaced_in(tmp_path)), now=NOW, outside=lambda: contents(tmp_path))

    assert contents(tmp_path) == {"1.txt": "1\n", "2.txt": "2\n", "3.txt": "3\n"}


def test_repeated_external_effect_fails(sessions: type[Session], tmp_path: Path) -> None:
    file = tmp_path / "archive"
    write = appended_to(file)

    def write_and_fail(session: Session) -> None:
        write(session)
        raise ValueError("the row stays")

    with pytest.raises(AssertionError, match="outside, after the second: {'archive': '1\\\\n2\\\\n3\\\\n1\\\\n2"):
        assert_idempotent(archived(write_and_fail), now=NOW, outside=lambda: contents(tmp_path))


def test_open_transaction_is_rejected(sessions: type[Session]) -> None:
    with database.atomic(), pytest.raises(Refused, match="a transaction is open on the library's connection"):
        assert_idempotent(sweep(), now=NOW)


def test_large_table_is_rejected(sessions: type[Session], housekeeping_database: Database) -> None:
    housekeeping_database.execute_sql(
        "INSERT INTO session (expires_at, seen) SELECT now(), 0 FROM generate_series(1, 10000)"
    )

    with pytest.raises(Refused, match="session has more than 10,000 rows: this is for a few rows"):
        assert_idempotent(sweep(), now=NOW)


def test_missing_database_error_names_the_remedy() -> None:
    with pytest.raises(Refused, match="use the fixture housekeeping_database"):
        assert_idempotent(sweep(), now=NOW)
