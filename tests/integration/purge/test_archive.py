"""A purge moves its rows to an archive, from which they are restored."""

from __future__ import annotations

import pytest

from tests.integration.purge.conftest import EXPIRED, Left, purge
from tests.internals.core import WrongArgument
from tests.internals.database import Database
from tests.internals.engine import PurgeRequest, recorded_request, restoration_of, sweep_of
from tests.internals.insight import plan_purge
from tests.internals.ledger import history

REQUEST = PurgeRequest(table="sessions", where=EXPIRED, batch_size=4, archive_to="old_sessions")


@pytest.fixture
def archive(sessions: Left, postgres: Database) -> None:
    """The archive that the plan asks for."""
    with pytest.raises(WrongArgument) as missing:
        plan_purge(REQUEST, sweep_of(REQUEST))
    postgres.execute_sql(str(missing.value).partition("; ")[2])


def test_rows_move_to_the_archive_of_a_purge(archive: None, sessions: Left, postgres: Database) -> None:
    result = purge(REQUEST)

    assert (result.outcome, result.counts["archived_rows"], sessions()) == ("done", 10, [11, 12])
    moved = postgres.execute_sql("SELECT id, note, archived_by_run FROM old_sessions ORDER BY id").fetchall()
    assert moved == [(n, f"note {n}", result.run_id) for n in range(1, 11)]


def test_purge_with_an_archive_is_restored(archive: None, sessions: Left, postgres: Database) -> None:
    run_id = purge(REQUEST).run_id
    assert run_id is not None
    record = history.find(run_id)
    assert record is not None

    restored = restoration_of(sweep_of(recorded_request(record)), run_id).carry_out(pause=True)

    assert (restored.worker, restored.outcome, restored.counts["restored"]) == ("restore:purge:sessions", "done", 10)
    assert sessions() == list(range(1, 13))


def test_missing_archive_is_rejected_with_its_statement(sessions: Left) -> None:
    with pytest.raises(
        WrongArgument, match='archive .old_sessions. is missing; CREATE TABLE "old_sessions"'
    ) as rejected:
        plan_purge(REQUEST, sweep_of(REQUEST))

    assert "\n" not in str(rejected.value)


def test_wrong_name_of_an_archive_is_rejected_in_one_line(sessions: Left) -> None:
    with pytest.raises(WrongArgument, match="--archive-to"):
        sweep_of(PurgeRequest(table="sessions", where=EXPIRED, archive_to="a.b.c"))
