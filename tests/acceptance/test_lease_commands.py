"""The commands ``housekeeping leases list`` and ``release``."""

from __future__ import annotations

import json
from datetime import timedelta

import pytest
import redis

from housekeeping import ExclusiveLease
from tests.acceptance.conftest import Command
from tests.internals.database import Database, database
from tests.internals.leases import LeaseRow

#: Starts many processes.
pytestmark = pytest.mark.slow

TTL = timedelta(minutes=10)
KEY = "報告/夜"
REDIS_AWAY = {"REDIS_URL": "unix:///nowhere/redis.sock"}


@pytest.fixture
def held(postgres: Database, redis_client: redis.Redis) -> ExclusiveLease:
    """Hold a lease in this process."""
    lease = ExclusiveLease(KEY, TTL, fenced=True, worker="reports")
    assert lease.try_obtain() is not None
    with database.atomic():
        lease.fence()
    return lease


def test_leases_are_listed_and_released(command: Command, held: ExclusiveLease) -> None:
    listed = command("leases", "list", "--json")
    released = command("leases", "release", KEY)

    assert (listed.returncode, listed.stderr, released.returncode, released.stderr) == (0, "", 0, "")
    facts = json.loads(listed.stdout)
    assert facts["redis"] == "ok"
    assert [(each["key"], each["worker"], each["epoch"], each["run_id"]) for each in facts["leases"]] == [
        (KEY, "reports", 1, None)
    ]
    assert released.stdout.startswith(f"released: {KEY}, held by reports on ")
    assert not held.exists()
    assert command("leases", "list").stdout == "no leases are held\n"


def test_release_of_a_free_lease_is_an_error(command: Command, postgres: Database, redis_client: redis.Redis) -> None:
    finished = command("leases", "release", "\x1b[2J")

    assert (finished.returncode, finished.stdout, finished.stderr.count("\n")) == (2, "", 1)
    assert finished.stderr.startswith("housekeeping: no lease '\\x1b[2J' is held")


@pytest.mark.parametrize(
    ("away", "line"),
    [
        (REDIS_AWAY, "Redis did not answer"),
        ({"DATABASE_URL": "postgresql://postgres@/postgres?host=/nowhere"}, "PostgreSQL did not answer"),
    ],
)
def test_release_changes_nothing_while_a_server_is_unavailable(
    command: Command, held: ExclusiveLease, away: dict[str, str], line: str
) -> None:
    finished = command("leases", "release", KEY, **away)

    assert (finished.returncode, finished.stdout, finished.stderr.count("\n")) == (1, "", 1)
    assert line in finished.stderr
    assert held.exists()
    assert LeaseRow.get().epoch == 1


def test_release_without_database_warns_about_missing_fencing(command: Command, held: ExclusiveLease) -> None:
    finished = command("leases", "release", KEY, DATABASE_URL="")

    assert finished.returncode == 0
    assert "cannot be fenced off" in finished.stderr
    assert not held.exists()


def test_list_without_redis_shows_the_leases_in_the_database(command: Command, held: ExclusiveLease) -> None:
    finished = command("leases", "list", **REDIS_AWAY)

    assert finished.returncode == 0
    assert "Redis did not answer" in finished.stdout and "the leases that the database knows" in finished.stdout
