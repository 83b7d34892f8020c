"""Rights of the roles that archive and restore."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from psycopg2.extensions import connection as Connection

from housekeeping import Settings
from housekeeping.testing.stubs import ManualClock
from tests.integration.archives.tickets import NOW, sweep
from tests.integration.roles import connected_as_a_role
from tests.internals.database import Database
from tests.internals.doctor import tables_of
from tests.internals.engine import declared_by, restoration_of, run_sweep

CLOCK = ManualClock(NOW)


@pytest.fixture
def role(archive: None, postgres: Database, settings: Settings, admin: Connection) -> Iterator[str]:
    """Connect with a role that has exactly the rights of `doctor --grants`."""
    rights = {table: needed for table, (_, needed) in tables_of(declared_by("shop", [sweep()])).items()}
    with connected_as_a_role(postgres, settings, admin, rights) as name:
        yield name


def test_role_with_the_documented_rights_archives_and_restores(role: str, admin: Connection) -> None:
    run = run_sweep(sweep(), clock=CLOCK)
    assert run.run_id is not None and (run.outcome, run.counts["archived_rows"]) == ("done", 5)

    with admin.cursor() as cursor:
        cursor.execute(f"GRANT INSERT ON ticket TO {role}; GRANT SELECT, UPDATE, DELETE ON old_tickets TO {role}")
    result = restoration_of(sweep(), run.run_id).carry_out(pause=True)

    assert (result.outcome, result.counts["restored"]) == ("done", 5)
