from __future__ import annotations

import os
import re
import signal
import stat
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import peewee
import psutil
import psycopg2
import pytest
import redis
from dramatiq.brokers.redis import RedisBroker

from tests.integration.embedded.observing import PATIENCE, answers_of, processes_in, query, shared_memory, traces
from tests.internals.core import EmbeddedServerError
from tests.internals.embedded import embedded

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def servers() -> Iterator[embedded.Servers]:
    """Servers shared by many tests; a test that stops one starts it again."""
    with embedded.start() as servers:
        yield servers


def test_both_servers_answer_with_their_versions(servers: embedded.Servers) -> None:
    answers = answers_of(servers.database_url, servers.redis_url)
    version = query(servers.database_url, "SHOW server_version").split()[0]

    assert answers == (1, True)
    assert version == servers.versions["postgres"]
    assert servers.versions["redis"].startswith(("Redis ", "Valkey "))


def test_variables_of_another_server_do_not_mislead(servers: embedded.Servers, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"PGPORT": "55470", "PGUSER": "somebody", "PGDATABASE": "elsewhere"}.items():
        monkeypatch.setenv(name, value)

    assert answers_of(servers.database_url, servers.redis_url) == (1, True)


def test_peewee_and_dramatiq_accept_the_urls(servers: embedded.Servers) -> None:
    database = peewee.PostgresqlDatabase(servers.database_url)
    settings = "SELECT current_setting('server_encoding'), current_setting('timezone')"
    with database.connection_context():
        encoding_and_zone = database.execute_sql(settings).fetchone()
    broker = RedisBroker(url=servers.redis_url)
    broker.declare_queue("default")
    messages = broker.do_qsize("default")
    broker.close()

    assert encoding_and_zone == ("UTF8", "UTC")
    assert messages == 0


def test_no_server_listens_on_a_port(servers: embedded.Servers) -> None:
    with redis.Redis.from_url(servers.redis_url) as client:
        port = client.config_get("port")

    assert query(servers.database_url, "SHOW listen_addresses") == ""
    assert port == {"port": "0"}


def test_other_users_can_neither_read_the_data_nor_connect(servers: embedded.Servers) -> None:
    modes = {part: stat.S_IMODE((servers.folder / part).stat().st_mode) for part in ("pg", "s", "r")}

    assert modes == {"pg": 0o700, "s": 0o700, "r": 0o700}


@pytest.mark.skipif(os.geteuid() != 0, reason="only root has to be another for it")
def test_root_runs_postgres_as_nobody(servers: embedded.Servers) -> None:
    assert {process.info["username"] for process in processes_in(servers.folder / "pg")} == {"nobody"}


@pytest.mark.parametrize("down", ["stop", "kill"])
def test_after_an_outage_postgres_keeps_data_and_redis_is_empty(servers: embedded.Servers, down: str) -> None:
    with redis.Redis.from_url(servers.redis_url) as client:
        query(servers.database_url, f"CREATE TABLE kept_on_{down} AS SELECT 7 AS number")
        client.set("kept", "no")

        for name in ("postgres", "redis"):
            getattr(servers, down)(name)
        with pytest.raises(psycopg2.OperationalError):
            query(servers.database_url, "SELECT 1")
        with pytest.raises(redis.ConnectionError):
            client.ping()
        for name in ("postgres", "redis"):
            servers.start(name)

        assert query(servers.database_url, f"SELECT number FROM kept_on_{down}") == 7
        assert client.dbsize() == 0


def test_a_restart_ends_open_connections_and_takes_new_ones(servers: embedded.Servers) -> None:
    connection = psycopg2.connect(servers.database_url)
    with redis.Redis.from_url(servers.redis_url) as client:
        client.set("kept", "no")

        servers.restart("postgres")
        servers.restart("redis")

        with pytest.raises(psycopg2.OperationalError):
            connection.cursor().execute("SELECT 1")
        connection.close()
        assert client.dbsize() == 0
    assert answers_of(servers.database_url, servers.redis_url) == (1, True)


@contextmanager
def busy_session(database_url: str) -> Iterator[threading.Thread]:
    """Session with a running statement; the thread ends with the statement."""

    def keep_busy() -> None:
        with pytest.raises(psycopg2.Error):
            # Not pg_sleep, which notices the end of the first process.
            query(database_url, "DO 'BEGIN LOOP END LOOP; END'")

    session = threading.Thread(target=keep_busy, daemon=True)
    session.start()
    while not query(database_url, "SELECT count(*) FROM pg_stat_activity WHERE query LIKE 'DO %'"):
        assert session.is_alive()
    yield session


def test_killing_postgres_kills_a_running_statement(servers: embedded.Servers) -> None:
    with busy_session(servers.database_url) as session:
        servers.kill("postgres")
        session.join(timeout=30)

        assert not session.is_alive()
    servers.start("postgres")


def test_start_waits_for_the_end_of_a_stop_in_another_thread(servers: embedded.Servers) -> None:
    with redis.Redis.from_url(servers.redis_url) as client:
        process = psutil.Process(client.info("server")["process_id"])
        process.suspend()
        stop = threading.Thread(target=servers.stop, args=("redis",))
        stop.start()
        status = Path(f"/proc/{process.pid}/status")
        deadline = time.monotonic() + PATIENCE
        while not int(re.findall(r"ShdPnd:\s*(\w+)", status.read_text())[0], 16) >> (signal.SIGTERM - 1) & 1:
            assert time.monotonic() < deadline, "no signal reached the server"
        start = threading.Thread(target=servers.start, args=("redis",))
        start.start()
        start.join(1)

        process.resume()
        stop.join(PATIENCE)
        start.join(PATIENCE)

        assert client.ping()


def test_starting_a_running_server_changes_nothing(servers: embedded.Servers) -> None:
    before = {process.pid for process in processes_in(servers.folder / "r")}

    servers.start("redis")

    assert {process.pid for process in processes_in(servers.folder / "r")} == before


def test_one_server_alone_can_be_started(place: Path) -> None:
    with embedded.start(postgres=False) as servers:
        with redis.Redis.from_url(servers.redis_url) as client:
            assert client.ping()
        with pytest.raises(EmbeddedServerError, match="no server 'postgres' was started here, only: redis"):
            _ = servers.database_url

    assert traces(place, segment=-1) == []


@pytest.mark.parametrize("source", ["wheels", "system"])
def test_the_source_of_postgres_can_be_forced(place: Path, monkeypatch: pytest.MonkeyPatch, source: str) -> None:
    monkeypatch.setenv("HOUSEKEEPING_EMBEDDED", source)
    try:
        servers = embedded.start(redis=False)
    except EmbeddedServerError as error:
        pytest.skip(str(error))

    with servers:
        assert query(servers.database_url, "SHOW server_version").split()[0] == servers.versions["postgres"]


def test_postgres_killed_during_a_statement_leaves_no_trace(place: Path) -> None:
    with embedded.start(redis=False) as servers:
        segment = shared_memory(servers.folder)
        with busy_session(servers.database_url):
            first_process = int((servers.folder / "pg" / "data" / "postmaster.pid").read_text().split()[0])
            os.kill(first_process, signal.SIGKILL)

    assert traces(place, segment) == []


def test_concurrent_servers_share_nothing(place: Path) -> None:
    barrier = threading.Barrier(2)
    started: list[embedded.Servers] = []

    def start() -> None:
        barrier.wait(timeout=10)
        started.append(embedded.start())

    threads = [threading.Thread(target=start) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    first, second = started
    first.close()

    assert first.folder != second.folder
    assert answers_of(second.database_url, second.redis_url) == (1, True)
    second.close()


def test_second_close_does_nothing_and_commands_are_rejected(place: Path) -> None:
    servers = embedded.start(postgres=False)

    servers.close()
    servers.close()

    with pytest.raises(EmbeddedServerError, match="cannot restart redis: the servers are closed"):
        servers.restart("redis")
