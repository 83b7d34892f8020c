"""Middleware on the database of Django and SQLAlchemy applications (docs/howto/existing-application-*.md)."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import redis
from psycopg2.extensions import connection as Connection
from psycopg2.extensions import parse_dsn
from sqlalchemy.engine import URL

from housekeeping import Settings
from tests.acceptance.examples import EXAMPLES, Application, without_settings
from tests.acceptance.examples import client as client
from tests.acceptance.examples import redis_url as redis_url
from tests.acceptance.processes import started
from tests.internals.database import Database
from tests.internals.leases import LeaseRow

pytestmark = pytest.mark.slow

#: {} and {package} are one of two packages.
SENDING = "from {}.tasks import send_reminders; send_reminders.send()"
LATE = """
from datetime import timedelta

import housekeeping
from housekeeping.core.errors import LeaseLost
from housekeeping.core.redis import shared_redis
from housekeeping.leases.lease import current_lease
from housekeeping.leases.renewal import RedisLeaseStore
from {package}.tasks import send_reminders

another = housekeeping.ExclusiveLease("reminders", timedelta(minutes=10), fenced=True)
with housekeeping.ExclusiveLease("reminders", timedelta(minutes=10), fenced=True) as lease:
    current_lease.set(lease)  # as if its message were at work
    leases = RedisLeaseStore(shared_redis.get(), shared_redis.namespace)
    leases.release("reminders", leases.owner("reminders"))  # as if it slept for more than the ttl
    assert another.try_obtain() is not None
    try:
        send_reminders.fn()
    except LeaseLost:
        raise SystemExit(0)
raise SystemExit("it was let through")
"""


def djangos(settings: Settings) -> dict[str, str]:
    """Return the variables that Django's example settings read."""
    given = parse_dsn(settings.require_database_url())
    names = {name: "DATABASE" if name == "dbname" else name.upper() for name in given}
    return {"DJANGO_SETTINGS_MODULE": "on_django.settings", **{f"PG{names[name]}": given[name] for name in given}}


def sqlalchemys(settings: Settings, driver: str) -> dict[str, str]:
    """Return the variables that the SQLAlchemy example reads."""
    given = parse_dsn(settings.require_database_url())
    names = {"username": given.pop("user"), "password": given.pop("password", None), "database": given.pop("dbname")}
    url = URL.create(f"postgresql+{driver}", **names, query=given)
    return {"REMINDERS_DATABASE_URL": url.render_as_string(hide_password=False)}


@pytest.fixture(params=["django", "sqlalchemy on psycopg2", "sqlalchemy on psycopg"])
def reminding(
    request: pytest.FixtureRequest,
    client: redis.Redis,
    redis_url: str,
    settings: Settings,
    postgres: Database,
    admin: Connection,
) -> Application:
    """Create an application with one reminder that is due and one that is not."""
    name, _, driver = request.param.partition(" on ")
    own = djangos(settings) if name == "django" else sqlalchemys(settings, driver)
    own_settings = {"REMINDERS_REDIS_URL": redis_url, "HOUSEKEEPING_SCHEMA": settings.schema_name, **own}
    with admin.cursor() as cursor:
        cursor.execute(
            f"CREATE TABLE {_table(name)} (id bigserial, text text, due_at timestamptz, sent_at timestamptz);"
            f"INSERT INTO {_table(name)} (text, due_at) "
            "VALUES ('due', now() - interval '1 hour'), ('later', now() + interval '1 hour')"
        )
    return Application(f"on_{name}.tasks", "dramatiq", without_settings(os.environ, **own_settings), client)


def _table(name: str) -> str:
    return "on_django_reminder" if "django" in name else "reminders"


def sent(reminding: Application, admin: Connection) -> list[tuple[str, bool]]:
    """Return each reminder's text and whether it was sent."""
    with admin.cursor() as cursor:
        cursor.execute(f"SELECT text, sent_at IS NOT NULL FROM {_table(reminding.module)} ORDER BY text")
        found: list[tuple[str, bool]] = cursor.fetchall()
    return found


def test_leased_actor_commits_on_its_applications_connection(
    reminding: Application, admin: Connection, tmp_path: Path
) -> None:
    reminding.run(SENDING.format(reminding.module.partition(".")[0]), tmp_path / "web.log")

    with reminding.at_work(tmp_path / "worker.log") as worker:
        reminding.wait_until_done(worker)

    assert sent(reminding, admin) == [("due", True), ("later", False)]
    assert [lease.key for lease in LeaseRow.select()] == ["reminders"]


def test_actor_whose_lease_passed_on_cannot_commit_on_its_connection(
    reminding: Application, admin: Connection, tmp_path: Path
) -> None:
    package = reminding.module.partition(".")[0]

    reminding.run(LATE.format(package=package), tmp_path / "late.log")

    assert sent(reminding, admin) == [("due", False), ("later", False)]


def test_django_migrates_the_tables_and_has_the_command_line(
    redis_url: str, settings: Settings, tmp_path: Path
) -> None:
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    own_settings = {"HOUSEKEEPING_SCHEMA": settings.schema_name, "PYTHONPATH": str(EXAMPLES), "PATH": path}
    environment = without_settings(os.environ, **djangos(settings), REMINDERS_REDIS_URL=redis_url, **own_settings)

    command = ["bash", "-euc", "python -m django migrate; python -m django housekeeping runs"]
    with started(command, environment, tmp_path / "init.log") as process:
        assert process.running.wait(60) == 0, process.text()
