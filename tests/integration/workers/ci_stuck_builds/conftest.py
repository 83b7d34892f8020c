"""Tables of builds as created by the library, and as in a real installation."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis
from dramatiq.brokers.redis import RedisBroker
from psycopg2.extensions import connection as Connection

from housekeeping import Settings, events
from housekeeping.workers.ci_stuck_builds.models import Build
from tests.integration.middleware.applications import close_all, installed, queued
from tests.integration.workers.ci_stuck_builds.tables import GITLAB_SHAPED, AddBuilds, Delayed, Refuse
from tests.internals.database import Database, restore_declared_key
from tests.internals.engine import register, send
from tests.internals.workers import BUILD_SWEEPS as SWEEPS


@pytest.fixture
def bound(postgres: Database, redis_client: redis.Redis) -> Iterator[None]:
    """Reset what the model has read from this test's table."""
    yield
    Build._meta.set_table_name("ci_builds")
    restore_declared_key(Build)
    send.forget_all()


@pytest.fixture
def builds(postgres: Database, bound: None) -> type[Build]:
    """The empty table of builds, as the library makes it."""
    postgres.create_tables([Build])
    return Build


@pytest.fixture
def gitlab_builds(postgres: Database, bound: None, admin: Connection) -> type[Build]:
    """An empty, partitioned table with more columns and another name."""
    with admin.cursor() as cursor:
        cursor.execute(GITLAB_SHAPED)
    Build._meta.set_table_name("p_ci_builds")
    return Build


@pytest.fixture
def broker(settings: Settings, builds: type[Build]) -> Iterator[RedisBroker]:
    """A broker with the library's middleware and these workers."""
    # Without the database, whose handle the test has.
    broker = installed(settings.model_copy(update={"database_url": None}))
    for sweep in SWEEPS:
        register(broker, sweep)
    yield broker
    close_all()


@pytest.fixture
def delayed(broker: RedisBroker) -> Delayed:
    """Return the delayed messages in order of their due time."""
    return lambda: sorted(queued(broker, "cronjob.DQ"), key=lambda message: int(message.options["eta"]))


@pytest.fixture(params=["builds", "gitlab_builds"])
def either(request: pytest.FixtureRequest) -> type[Build]:
    """One of the two tables; the test runs on both."""
    table: type[Build] = request.getfixturevalue(request.param)
    return table


@pytest.fixture
def add_builds(admin: Connection) -> AddBuilds:
    """Add builds from SQL; `n` counts from `first_id` on."""

    def add(
        count: int,
        status: str,
        created: str,
        updated: str,
        *,
        first_id: int = 1,
        **columns: str,
    ) -> None:
        table: Any = Build._meta
        given = {
            "id": "n",
            "type": "'Ci::Build'",
            "status": f"'{status}'",
            "created_at": created,
            "updated_at": updated,
            "project_id": "n % 10",
            "runner_id": "n % 7",
            "name": "'rspec ' || n",
            "stage": "'test'",
            "commit_id": "n + 5000",
            "lock_version": "3",
            **({"partition_id": "100 + n % 3"} if table.table_name == "p_ci_builds" else {}),
            **columns,
        }
        with admin.cursor() as cursor:
            cursor.execute(
                f"INSERT INTO {table.table_name} ({', '.join(given)}) SELECT {', '.join(given.values())} "
                f"FROM generate_series({first_id}, {first_id + count - 1}) AS n"
            )

    return add


@pytest.fixture
def refuse(admin: Connection) -> Refuse:
    """Make the database reject an update, like a constraint or trigger."""

    def refuse(condition: str) -> None:
        table: Any = Build._meta
        with admin.cursor() as cursor:
            cursor.execute(
                "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS "
                f"$$ BEGIN IF {condition} THEN RAISE EXCEPTION 'the pipeline is gone'; END IF; RETURN NEW; END $$;"
                f"CREATE TRIGGER refuse BEFORE UPDATE ON {table.table_name} FOR EACH ROW EXECUTE FUNCTION refuse()"
            )

    return refuse


@pytest.fixture
def heard() -> Iterator[Callable[[], dict[str, list[dict[str, Any]]]]]:
    """The rows that subscribers of the builds' events received, by event."""
    rows: dict[str, list[dict[str, Any]]] = {"build_dropped": [], "build_doomed": []}

    def dropped(sender: str, **told: Any) -> None:
        rows["build_dropped"] += told["rows"]

    def doomed(sender: str, **told: Any) -> None:
        rows["build_doomed"] += told["rows"]

    with events.build_dropped.connected_to(dropped), events.build_doomed.connected_to(doomed):
        yield lambda: rows
