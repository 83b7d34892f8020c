"""Failover of PostgreSQL as in docs/howto/failover.md: the primary is killed in a run, and its replica promoted."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, Final

import psycopg2
import pytest
import redis

from housekeeping import Settings
from tests.acceptance.pages import in_a_shell, with_programs
from tests.acceptance.processes import eventually, started
from tests.acceptance.test_several_hosts import BUILDS, DROP_CANCELING, Queue
from tests.acceptance.test_several_hosts import commits as commits
from tests.conftest import Urls
from tests.failover_servers import make_synchronous
from tests.integration.database.replicas.standby import Standby
from tests.internals.database import Database
from tests.internals.embedded import embedded
from tests.spare_schema import SpareSchema
from tests.unit.docs.blocks import ROOT, blocks

pytestmark = [pytest.mark.slow, pytest.mark.direct_only(reason="the pooler would have to follow the primary")]

PAGE: Final = ROOT / "docs/howto/failover.md"
#: After the promotion; what docs/howto/failover.md promises, and time for a busy machine.
PATIENCE_S = 90.0
#: Without Redis each minute has a tick, and the housekeeping of the library itself has runs.
ATTEMPTS: Final = f"runs WHERE worker = '{DROP_CANCELING}' AND outcome IS DISTINCT FROM 'skipped'"


def _standby(primary: str) -> Standby:
    # A short path, because the name of a socket may not be long.
    return Standby(primary, Path(tempfile.mkdtemp(prefix="housekeeping-failover-", dir="/tmp")))


@pytest.fixture
def pair() -> Iterator[tuple[Standby, Standby]]:
    """Start a primary and its streaming replica, both of which the test may kill."""
    with embedded.start(redis=False) as servers:
        primary = _standby(servers.database_url)
        primary.promote()
    replica = _standby(primary.url)
    yield primary, replica
    for each in (replica, primary):
        each.remove()


@pytest.fixture
def urls(pair: tuple[Standby, Standby]) -> Iterator[Urls]:
    hosts = ",".join(each.url.partition("host=")[2] for each in pair)
    with embedded.start(postgres=False) as servers:
        yield Urls(f"postgresql://postgres@/postgres?host={hosts}&target_session_attrs=read-write", servers.redis_url)


@pytest.fixture
def spare_schema(urls: Urls) -> Iterator[SpareSchema]:
    yield SpareSchema(urls.database)  # whose server is gone at the end


@pytest.mark.parametrize(
    ("is_synchronous", "command"),
    [(True, "worker"), (False, "worker"), (True, "serve")],
    ids=["synchronous", "asynchronous", "without Redis"],
)
def test_killed_primary_costs_one_batch_and_the_next_attempt_continues(  # F1, F2
    pair: tuple[Standby, Standby],
    commits: Callable[[], list[tuple[int, int]]],
    environment: dict[str, str],
    redis_client: redis.Redis,
    settings: Settings,
    is_synchronous: bool,
    command: str,
    tmp_path: Path,
) -> None:
    primary, replica = pair
    if is_synchronous:
        make_synchronous(primary.url)
    worker = {"batch_size": 5, "log_records": False, "schedule": "* * * * *"}
    environment["HOUSEKEEPING_WORKERS"] = json.dumps({DROP_CANCELING: worker})
    if command == "serve":
        del environment["HOUSEKEEPING_REDIS_URL"], environment["HOUSEKEEPING_BROKER_URL"]

    def read(server: Standby, query: str) -> Any:
        with closing(psycopg2.connect(server.url)) as connection, connection.cursor() as cursor:
            cursor.execute(f"SET search_path TO {settings.namespace}, {settings.schema_name}")
            cursor.execute(query)
            return cursor.fetchall()

    with started(
        [sys.executable, "-m", "housekeeping", command, "--threads", "2"], environment, tmp_path / "log"
    ) as process:
        Queue(redis_client, environment["HOUSEKEEPING_NAMESPACE"]).send("one")
        eventually(lambda: len(commits()) > 3, process)
        known = len(commits())
        primary.kill()
        replica.promote()
        kept = len(read(replica, "SELECT * FROM commits"))
        eventually(
            lambda: read(replica, "SELECT count(*) FROM ci_builds WHERE status = 'canceling'") == [(0,)],
            process,
            patience_s=PATIENCE_S,
        )
        eventually(
            lambda: read(replica, f"SELECT count(*) FROM {ATTEMPTS} AND outcome IS NULL") == [(0,)],
            process,
            patience_s=PATIENCE_S,
        )

    assert kept >= known or not is_synchronous, "what was committed is on the replica"
    assert read(replica, "SELECT count(*), count(DISTINCT build_id) FROM dropped") == [(BUILDS, BUILDS)]
    assert read(replica, "SELECT sum((counts->>'dropped')::int) FROM runs") == [(BUILDS,)]
    assert read(replica, f"SELECT outcome FROM {ATTEMPTS} AND outcome IS NOT NULL ORDER BY id")[-1] == ("done",)
    epochs = [epoch for (epoch,) in read(replica, "SELECT epoch FROM commits WHERE epoch IS NOT NULL ORDER BY id")]
    assert epochs == sorted(epochs)


def test_doctor_of_the_page_names_both_hosts_and_the_replica(
    pair: tuple[Standby, Standby], urls: Urls, postgres: Database, environment: dict[str, str], tmp_path: Path
) -> None:
    make_synchronous(pair[0].url)
    [commands] = (block.text for block in blocks(PAGE) if block.kind == "sh")
    address, shown = "user:password@db1:5432,db2:5432/app?", blocks(PAGE)[1].text
    assert address in commands
    ours = commands.replace(address, urls.database.removeprefix("postgresql://").partition("target_session")[0])

    printed = in_a_shell(ours, with_programs(environment), tmp_path)

    lines = [line.split() for line in printed.splitlines()]
    assert [line for line in shown.splitlines() if line.split() not in lines] == [], printed
