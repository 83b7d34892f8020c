"""Servers whose processes are suspended: interactive commands ask each of them once, and say so once."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import psycopg2
import pytest
import redis

from housekeeping import Settings
from tests.acceptance.conftest import Command
from tests.acceptance.processes import Process, eventually, started
from tests.integration.costs.round_trips import round_trips
from tests.internals.brokers import DeadLetterStore, dead_letters_of, message_broker
from tests.internals.core import BrokerUnavailable, DatabaseUnavailable, impatient
from tests.internals.database import connect_to, database, translate_postgres_errors
from tests.internals.embedded import embedded
from tests.internals.web import create_app
from tests.internals.workers import configured_sweeps
from tests.rabbitmq_server import Node, node

#: Starts servers.
pytestmark = pytest.mark.slow

WORKER = "user_status_cleanup.batch"


@contextmanager
def suspended(pid: int) -> Iterator[None]:
    """Suspend a server with all its processes."""
    server = psutil.Process(pid)
    server.suspend()  # first, so that it starts no other one
    processes = [server, *server.children(recursive=True)]
    try:
        for each in processes:
            with suppress(psutil.NoSuchProcess):  # a session that has just ended
                each.suspend()
        yield
    finally:
        for each in processes:
            with suppress(psutil.NoSuchProcess):
                each.resume()


@contextmanager
def a_waiting_statement(url: str, table: str, process: Process) -> Iterator[None]:
    """Lock a table, and begin the block once another session waits for it."""
    with psycopg2.connect(url) as connection, connection.cursor() as cursor:
        cursor.execute(f"LOCK TABLE {table}")

        def waits() -> bool:
            cursor.execute(
                "SELECT EXISTS (SELECT FROM pg_locks WHERE NOT granted AND relation = %s::regclass)", (table,)
            )
            row = cursor.fetchone()
            return row is not None and bool(row[0])

        eventually(waits, process)
        yield


@pytest.fixture(scope="module")
def servers() -> Iterator[embedded.Servers]:
    """Servers that a test may suspend."""
    with embedded.start() as started:
        yield started


@pytest.fixture
def postmaster(servers: embedded.Servers) -> int:
    with psycopg2.connect(servers.database_url) as connection, connection.cursor() as cursor:
        cursor.execute("SELECT pg_backend_pid()")
        row = cursor.fetchone()
        assert row is not None
        return int(psutil.Process(row[0]).ppid())


@pytest.mark.parametrize(
    "words",
    [
        ["plan", WORKER],
        ["why", WORKER],
        ["status"],
        ["status", WORKER],
        ["leases", "list"],
        ["deadletters", "list"],
        ["errors"],
    ],
    ids=" ".join,
)
def test_hung_redis_is_asked_once(command: Command, made: None, servers: embedded.Servers, words: list[str]) -> None:
    pid = redis.Redis.from_url(servers.redis_url).info("server")["process_id"]
    with suspended(pid), round_trips(servers.redis_url) as attempts:
        finished = command(*words, REDIS_URL=attempts.url)

    assert attempts.count == 1
    said = finished.stdout + finished.stderr
    assert said.count("did not answer: Timeout") == 1, said


@pytest.mark.parametrize("words", [["plan", WORKER], ["why", WORKER], ["status"], ["runs"]], ids=" ".join)
def test_hung_postgres_is_asked_once(
    command: Command, servers: embedded.Servers, postmaster: int, words: list[str]
) -> None:
    with suspended(postmaster), round_trips(servers.database_url) as attempts:
        finished = command(*words, DATABASE_URL=attempts.url)

    assert attempts.count == 1
    assert (finished.returncode, finished.stderr.count("did not answer")) == (1, 1), finished.stderr


def test_serve_stops_within_its_grace_period_although_its_database_hangs(
    environment: dict[str, str],
    without_redis: None,
    made: None,
    servers: embedded.Servers,
    settings: Settings,
    postmaster: int,
    tmp_path: Path,
) -> None:
    # R5
    environment |= {"HOUSEKEEPING_DATABASE_URL": servers.database_url, "HOUSEKEEPING_GRACE_S": "1"}
    command = [sys.executable, "-m", "housekeeping"]
    subprocess.run([*command, "init"], env=environment, check=True)

    with started([*command, "serve"], environment, tmp_path / "serve") as serving:
        with (
            a_waiting_statement(servers.database_url, f'"{settings.schema_name}".ticks', serving),
            suspended(postmaster),
        ):
            status = serving.terminate()

    assert status == 143
    assert "ended at once; other processes resume its runs" in serving.text()


def test_server_that_hangs_during_a_statement_is_given_up(servers: embedded.Servers, postmaster: int) -> None:
    before = database.obj
    with round_trips(servers.database_url) as attempts:
        database.initialize(connect_to(attempts.url))
        try:
            database.execute_sql("SELECT 1")
            asked = attempts.count
            with suspended(postmaster), impatient():
                for _ in range(2):
                    with pytest.raises(DatabaseUnavailable), translate_postgres_errors():
                        database.execute_sql("SELECT 1")
        finally:
            database.close()
            database.initialize(before)

    # The statement, and whether it is the server that does not answer.
    assert attempts.count - asked == 2


def test_slow_statement_of_a_server_that_answers_is_waited_for(servers: embedded.Servers) -> None:
    before = database.obj
    database.initialize(connect_to(servers.database_url))
    try:
        with impatient():
            row = database.execute_sql("SELECT 7 FROM pg_sleep(3)").fetchone()
    finally:
        database.close()
        database.initialize(before)

    assert row == (7,)


@pytest.fixture(scope="module")
def rabbitmq(request: pytest.FixtureRequest) -> Iterator[Node]:
    """A node that a test may suspend."""
    if request.config.getoption("broker") != "rabbitmq":
        pytest.skip("RabbitMQ was not requested: --broker=rabbitmq")
    with node() as running:
        yield running


@pytest.mark.parametrize(
    "words", [["status"], ["doctor"], ["plan", WORKER], ["why", WORKER], ["deadletters", "list"]], ids=" ".join
)
def test_hung_rabbitmq_is_asked_once(command: Command, made: None, rabbitmq: Node, words: list[str]) -> None:
    with suspended(rabbitmq.pid), round_trips(rabbitmq.url) as attempts:
        finished = command(*words, BROKER_URL=attempts.url)

    said = finished.stdout + finished.stderr
    assert said.count("RabbitMQ did not answer") == 1, said
    assert attempts.count == 1


def test_page_says_that_rabbitmq_hangs(made: None, settings: Settings, rabbitmq: Node) -> None:
    only = {WORKER: configured_sweeps(settings)[WORKER]}
    with suspended(rabbitmq.pid), round_trips(rabbitmq.url) as attempts:
        there = settings.model_copy(update={"broker_url": attempts.url})
        page = create_app(there, only, "a-token-of-the-tests", open_to_read=True).test_client().get("/")

    text = page.get_data(as_text=True)
    assert (page.status_code, text.count("RabbitMQ did not answer"), attempts.count) == (200, 1, 1)


@pytest.fixture
def letters(settings: Settings, rabbitmq: Node) -> Iterator[DeadLetterStore]:
    """Dead letters whose reader is connected."""
    # Without heartbeats, which would end the wait after a minute.
    there = settings.model_copy(update={"broker_url": f"{rabbitmq.url}?heartbeat=0"})
    broker = message_broker(there)
    broker.declare_queue("default")
    store = dead_letters_of(broker)
    assert store.counts() == {}
    yield store
    broker.close()


def test_rabbitmq_that_hangs_after_connecting_is_given_up(rabbitmq: Node, letters: DeadLetterStore) -> None:
    with suspended(rabbitmq.pid), impatient():
        for _ in range(2):
            with pytest.raises(BrokerUnavailable, match="RabbitMQ did not answer"):
                letters.counts()
