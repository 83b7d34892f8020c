"""A sweep with a lease, and what its runs have committed."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from psycopg2.extensions import connection as Connection

from housekeeping import Lease, Settings
from tests.integration.sweeps.engine.executed import SMALL

TTL = timedelta(minutes=10)
LEASED = dataclasses.replace(SMALL, lease=Lease("statuses", TTL))


@pytest.fixture
def audited(statuses: object, admin: Connection, settings: Settings) -> Callable[[], dict[str, Any]]:
    """Return the commits that triggers recorded: how often each row was deleted, and the epochs in order."""
    runs_table = f"{settings.schema_name}.runs"
    with admin.cursor() as cursor:
        cursor.execute(
            "CREATE TABLE deletions (user_id bigint); CREATE TABLE commits (id serial, epoch bigint);"
            "CREATE FUNCTION note_deletion() RETURNS trigger LANGUAGE plpgsql AS "
            "$$ BEGIN INSERT INTO deletions VALUES (OLD.user_id); RETURN OLD; END $$;"
            "CREATE TRIGGER note AFTER DELETE ON user_statuses FOR EACH ROW EXECUTE FUNCTION note_deletion();"
            f"CREATE FUNCTION {settings.schema_name}.note_epoch() RETURNS trigger LANGUAGE plpgsql AS "
            f"$$ BEGIN INSERT INTO {settings.namespace}.commits (epoch) VALUES (NEW.epoch); RETURN NEW; END $$;"
            # Not what closes a row that broke off: that is no effect, and comes after the successor's.
            f"CREATE TRIGGER note AFTER UPDATE ON {runs_table} FOR EACH ROW WHEN (NEW.error IS NULL) "
            f"EXECUTE FUNCTION {settings.schema_name}.note_epoch();"
        )

    def noted() -> dict[str, Any]:
        with admin.cursor() as cursor:
            cursor.execute("SELECT count(*), count(DISTINCT user_id) FROM deletions")
            deleted, different = cursor.fetchone() or (0, 0)
            cursor.execute("SELECT epoch FROM commits ORDER BY id")
            epochs = [epoch for (epoch,) in cursor.fetchall()]
            cursor.execute(f"SELECT coalesce(sum((counts->>'deleted_rows')::int), 0) FROM {runs_table}")
            (counted,) = cursor.fetchone() or (0,)
        return {"deleted": deleted, "different": different, "counted": counted, "epochs": epochs}

    return noted
