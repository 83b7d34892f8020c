from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import pytest
import redis
from dramatiq import Message
from psycopg2.extensions import connection as Connection

from housekeeping.workers.ci_stuck_builds.models import Build
from tests.acceptance.hosts import Network, network, servers
from tests.acceptance.processes import Process, eventually, started
from tests.conftest import Urls
from tests.internals.database import Database
from tests.internals.ledger import Run
from tests.spare_schema import SpareSchema

pytestmark = pytest.mark.slow

DROP_CANCELING: Final = "ci.stuck_builds.drop_canceling"
BUILDS: Final = 400
#: Ample: messages of a silent worker return after a minute, and a retry waits for half a minute at most.
PATIENCE_S: Final = 240.0
WORKER: Final = [sys.executable, "-m", "housekeeping", "worker", "--processes", "1", "--threads", "2"]


@pytest.fixture(scope="module")
def lan() -> Iterator[Network]:
    with network(hosts=3) as lan:
        yield lan


@pytest.fixture(scope="module")
def urls(lan: Network) -> Iterator[Urls]:
    with servers(lan.address) as urls:
        yield urls


@pytest.fixture(scope="module")
def spare_schema(urls: Urls) -> Iterator[SpareSchema]:
    spare = SpareSchema(urls.database)
    yield spare
    spare.close()


@pytest.fixture
def commits(postgres: Database, admin: Connection) -> Callable[[], list[tuple[int, int]]]:
    """Return the run and epoch of each commit that counted builds, in order. A build takes 10 ms, so runs last."""
    postgres.create_tables([Build])
    with admin.cursor() as cursor:
        cursor.execute(
            "INSERT INTO ci_builds (type, status, created_at, updated_at, project_id, commit_id, lock_version) "
            "SELECT 'Ci::Build', 'canceling', ago, ago, 1, n, 0 FROM generate_series(1, %s) AS n, "
            "LATERAL (SELECT (now() AT TIME ZONE 'UTC') - interval '26 hours' - interval '1 second' * n AS ago) AS old",
            (BUILDS,),
        )
        cursor.execute("CREATE TABLE dropped (build_id bigint)")
        cursor.execute("CREATE TABLE commits (id serial, run_id bigint, epoch bigint)")
        cursor.execute(
            "CREATE FUNCTION drop_slowly() RETURNS trigger LANGUAGE plpgsql AS "
            "$$ BEGIN PERFORM pg_sleep(0.01); INSERT INTO dropped VALUES (OLD.id); RETURN NEW; END $$"
        )
        cursor.execute("CREATE TRIGGER slow BEFORE UPDATE ON ci_builds FOR EACH ROW EXECUTE FUNCTION drop_slowly()")
        cursor.execute(
            "CREATE FUNCTION note() RETURNS trigger LANGUAGE plpgsql AS "
            "$$ BEGIN INSERT INTO commits (run_id, epoch) VALUES (NEW.id, NEW.epoch); RETURN NEW; END $$"
        )
        # A worker's session does not know the schema of the trigger's tables otherwise.
        for function in ("drop_slowly", "note"):
            cursor.execute(f"ALTER FUNCTION {function} SET search_path FROM CURRENT")
        cursor.execute(
            f"CREATE TRIGGER note AFTER UPDATE OF counts ON {Run._meta.schema}.runs FOR EACH ROW "
            "WHEN (NEW.counts IS DISTINCT FROM OLD.counts) EXECUTE FUNCTION note()"
        )

    def read() -> list[tuple[int, int]]:
        with admin.cursor() as cursor:
            cursor.execute("SELECT run_id, epoch FROM commits ORDER BY id")
            return list(cursor.fetchall())

    return read


class Queue:
    """The worker's queue, read from outside."""

    def __init__(self, client: redis.Redis, namespace: str) -> None:
        self._client = client
        self._name = f"{namespace}:broker:cronjob"

    def send(self, name: str) -> None:
        message: Message[Any] = Message("cronjob", DROP_CANCELING, (), {}, {"redis_message_id": name})
        self._client.hset(f"{self._name}.msgs", name, message.encode())
        self._client.rpush(self._name, name)

    def left(self) -> int:
        """Return the number of waiting, delayed, running and dead messages."""
        names = [f"{self._name}{kind}" for kind in (".msgs", ".DQ.msgs", ".XQ.msgs")]
        return sum(int(self._client.hlen(name)) for name in names)


def test_hosts_take_over_from_a_disconnected_one_without_repeats(  # B1, L1, L3
    lan: Network,
    commits: Callable[[], list[tuple[int, int]]],
    environment: dict[str, str],
    redis_client: redis.Redis,
    admin: Connection,
    tmp_path: Path,
) -> None:
    environment["HOUSEKEEPING_WORKERS"] = json.dumps(
        {DROP_CANCELING: {"batch_size": 5, "lease_ttl_s": 30, "max_runtime_s": 25, "log_records": False}}
    )
    environment["HOUSEKEEPING_GRACE_S"] = "1"
    queue = Queue(redis_client, environment["HOUSEKEEPING_NAMESPACE"])
    first, *others = lan.hosts

    def at_work(stack: ExitStack, host: Any) -> Process:
        process = stack.enter_context(started(host.command(*WORKER), environment, tmp_path / host.name))
        return process

    with ExitStack() as stack:
        cut_off = at_work(stack, first)
        queue.send("one")
        eventually(lambda: len(commits()) > 2, cut_off)
        first.cut_off()
        stack.callback(first.plug_in)
        rest = [at_work(stack, host) for host in others]
        eventually(
            lambda: not Build.select().where(Build.status == "canceling").exists(),
            cut_off,
            *rest,
            patience_s=PATIENCE_S,
        )
        eventually(lambda: not Run.select().where(Run.outcome.is_null()).exists(), *rest, patience_s=PATIENCE_S)

        # Alone, so that the disconnected host runs the new message.
        assert [process.terminate() for process in rest] == [0, 0]
        first.plug_in()
        # At once: the retry of the first message, which another host completed, holds no key.
        queue.send("after")
        eventually(lambda: Run.select().count() == 3 and queue.left() == 0, cut_off, patience_s=PATIENCE_S)
        ended = [line for line in cut_off.lines() if line["event"] == "Run ended"]

    runs = list(Run.select().order_by(Run.id))
    with admin.cursor() as cursor:
        cursor.execute("SELECT count(*), count(DISTINCT build_id) FROM dropped")
        dropped = cursor.fetchone()
    outcomes = [(run.outcome, run.reason, run.message_id == runs[0].message_id) for run in runs]
    assert outcomes == [("lost", "taken_over", True), ("done", None, True), ("done", None, False)]
    assert dropped == (BUILDS, BUILDS)
    assert sum(run.counts["dropped"] for run in runs) == BUILDS
    assert runs[0].counts["dropped"] and runs[1].counts["dropped"], "both did a part"
    epochs = [epoch for _, epoch in commits()]
    assert epochs == sorted(epochs) and len(set(epochs)) > 1
    assert [line["outcome"] for line in ended if line["message_id"] == runs[0].message_id] in (
        ["lost_lease"],
        ["failed"],
    )
