"""Restarts of the pooler between a run and PostgreSQL."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Final

import pytest
from psycopg2.extensions import connection as Connection

from housekeeping import Settings
from housekeeping.workers.user_status_cleanup.models import UserStatus
from tests.conftest import Urls
from tests.declarations import changed
from tests.integration.conftest import AddStatuses
from tests.integration.middleware.applications import eventually
from tests.internals.database import connect_to, database
from tests.internals.engine import run_sweep
from tests.internals.ledger import Run
from tests.internals.workers import status_sweep as sweep
from tests.pgbouncer_server import PgBouncer, pgbouncer

_DUE: Final = "now() - interval '1 hour' + interval '1 millisecond' * n"
_SLOW: Final = """
CREATE FUNCTION slow() RETURNS trigger LANGUAGE plpgsql AS
$$ BEGIN IF OLD.user_id = 15 THEN PERFORM pg_sleep(1); END IF; RETURN OLD; END $$;
CREATE TRIGGER slow BEFORE DELETE ON user_statuses FOR EACH ROW EXECUTE FUNCTION slow()
"""
SWEEP: Final = changed(sweep, batch=10)


@pytest.fixture
def restartable(urls: Urls, settings: Settings, add_statuses: AddStatuses) -> Iterator[PgBouncer]:
    """A pooler of this test's own, which the library's connections lead through; 25 statuses are stale."""
    add_statuses(25, _DUE)
    before = database.obj
    with pgbouncer(urls.database, pool_size=2) as own:
        database.initialize(connect_to(own.through(settings.require_database_url())))
        yield own
        database.close()
    database.initialize(before)


def _deleted() -> int:
    return sum(run.counts.get("deleted_rows", 0) for run in Run.select())


@pytest.mark.slow
def test_pooler_restarted_within_a_batch_loses_nothing(restartable: PgBouncer, admin: Connection) -> None:
    with admin.cursor() as cursor:
        cursor.execute(_SLOW)

    watching = admin.cursor()

    def executes() -> bool:
        # The server does not notice that its client has gone.
        watching.execute(
            "SELECT FROM pg_stat_activity WHERE wait_event = 'PgSleep' AND query ~ 'user_statuses' AND state = 'active'"
        )
        return bool(watching.rowcount)

    def restart() -> None:
        eventually(executes)
        restartable.restart()

    thread = threading.Thread(target=restart)
    thread.start()
    run_sweep(SWEEP)
    thread.join(timeout=20)
    eventually(lambda: not executes())

    assert run_sweep(SWEEP).outcome == "done"
    assert (UserStatus.select().count(), _deleted()) == (0, 25)
