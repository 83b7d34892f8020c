"""The signs as PostgreSQL's own views have them."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import psycopg2
import pytest
from psycopg2.extensions import connection as Connection
from psycopg2.extras import LogicalReplicationConnection, PhysicalReplicationConnection

from housekeeping import Settings
from tests.conftest import Urls
from tests.integration.conftest import AddStatuses, Locked
from tests.internals.database import Database, connect_to, database
from tests.internals.embedded import embedded
from tests.internals.engine import DbHealth, read_health

OURS = ['"user_statuses"']
_WITHOUT_REPLICA = pytest.mark.one_server_only(reason="a server without replicas has no lag")


def until(question: Callable[[], bool]) -> None:
    """Ask until it is so."""
    asked = threading.Event()
    for _ in range(300):
        if question():
            return
        asked.wait(0.1)
    pytest.fail("it was never so")


@contextmanager
def background(url: str, *statements: str) -> Iterator[int]:
    """Run statements in a session of its own, that may wait or fail; gives its process id."""
    session = psycopg2.connect(url)
    session.autocommit = True

    def run() -> None:
        try:
            with session.cursor() as cursor:
                for statement in statements:
                    cursor.execute(statement)
        except psycopg2.Error:
            pass  # cancelled at the end of the block

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield session.get_backend_pid()
    finally:
        session.cancel()
        thread.join(30)
        session.close()


@_WITHOUT_REPLICA
def test_healthy_database_has_known_signals(add_statuses: AddStatuses) -> None:
    assert read_health(OURS) == DbHealth(0.0, 0, False)


@_WITHOUT_REPLICA
def test_missing_tables_have_no_signals(postgres: Database) -> None:
    assert read_health(['"not_there"', '"no_schema"."x"', '"quo""ted"']) == DbHealth(0.0, 0, False)
    assert read_health([]).waiting_locks == 0


@pytest.mark.parametrize(
    "statement",
    ["LOCK TABLE user_statuses IN ACCESS EXCLUSIVE MODE", "UPDATE user_statuses SET clear_status_at = NULL"],
    ids=["the table", "a row"],
)
def test_sessions_waiting_for_a_table_or_its_rows_are_counted(
    add_statuses: AddStatuses, locked: Locked, application_url: str, statement: str
) -> None:
    add_statuses(1, "now()")

    with (
        locked("SELECT * FROM user_statuses FOR UPDATE"),
        background(application_url, f"BEGIN; {statement}"),
        background(application_url, f"BEGIN; {statement}"),
    ):
        until(lambda: read_health(OURS).waiting_locks == 2)
        assert read_health(['"pg_class"']).waiting_locks == 0

    assert read_health(OURS).waiting_locks == 0


def test_sessions_waiting_for_a_partition_are_counted(
    postgres: Database, admin: Connection, locked: Locked, application_url: str
) -> None:
    with admin.cursor() as cursor:
        cursor.execute(
            "CREATE TABLE parted (id int) PARTITION BY LIST (id); CREATE TABLE part PARTITION OF parted DEFAULT"
        )

    with locked("LOCK TABLE part"), background(application_url, "BEGIN; LOCK TABLE part"):
        until(lambda: read_health(['"parted"']).waiting_locks == 1)


def test_running_vacuum_of_the_table_is_seen(
    add_statuses: AddStatuses, admin: Connection, application_url: str
) -> None:
    add_statuses(20_000, "now()")
    with admin.cursor() as cursor:
        cursor.execute("DELETE FROM user_statuses")
    slowly = ("SET vacuum_cost_delay = 100", "SET vacuum_cost_limit = 1", "SET vacuum_cost_page_dirty = 100")

    with background(application_url, *slowly, "VACUUM user_statuses"):
        until(lambda: read_health(OURS).vacuum is True)
        assert read_health(['"pg_class"']).vacuum is False

    until(lambda: read_health(OURS).vacuum is False)


@pytest.fixture
def standby(urls: Urls) -> Iterator[Callable[[], None]]:
    """A connection that takes the write-ahead log as a standby does; called, it says that it has replayed all of it."""
    connection = psycopg2.connect(urls.database, connection_factory=PhysicalReplicationConnection)
    cursor = connection.cursor()
    cursor.execute("IDENTIFY_SYSTEM")
    cursor.start_replication(start_lsn=cursor.fetchone()[2], decode=False)

    def replay() -> None:
        while (message := cursor.read_message()) is not None:
            end = message.wal_end
            cursor.send_feedback(write_lsn=end, flush_lsn=end, apply_lsn=end, reply=True)

    yield replay
    connection.close()


def test_replication_lag_is_known_to_a_monitoring_role(
    add_statuses: AddStatuses, standby: Callable[[], None], admin: Connection
) -> None:
    began = time.monotonic()
    add_statuses(100, "now()")
    seen: list[float] = []

    def lags() -> bool:
        standby()
        seen.append(read_health(OURS).replication_lag_s or 0.0)
        return seen[-1] > 0

    until(lags)

    assert seen[-1] <= time.monotonic() - began


@pytest.fixture
def logical_consumer() -> Iterator[tuple[str, Callable[[], None]]]:
    """The URL of a server whose changes a consumer of a logical slot reads; called, it confirms those it has read."""
    with embedded.start(redis=False) as servers:
        with contextlib.closing(psycopg2.connect(servers.database_url)) as session:
            session.autocommit = True
            session.cursor().execute("ALTER SYSTEM SET wal_level = logical")
        servers.restart("postgres")
        consumer = psycopg2.connect(servers.database_url, connection_factory=LogicalReplicationConnection)
        cursor = consumer.cursor()
        cursor.execute("CREATE PUBLICATION changes FOR ALL TABLES")
        cursor.create_replication_slot("changes", output_plugin="pgoutput")
        cursor.start_replication("changes", options={"proto_version": "1", "publication_names": "changes"})

        def confirm() -> None:
            while (message := cursor.read_message()) is not None:
                end = message.wal_end
                cursor.send_feedback(write_lsn=end, flush_lsn=end, apply_lsn=end, reply=True)

        yield servers.database_url, confirm
        consumer.close()


@pytest.mark.slow
def test_lagging_consumer_of_a_logical_slot_is_no_standby(
    logical_consumer: tuple[str, Callable[[], None]], postgres: Database
) -> None:
    url, confirm = logical_consumer
    session = psycopg2.connect(url)
    session.autocommit = True
    cursor = session.cursor()
    cursor.execute("CREATE TABLE orders AS SELECT n FROM generate_series(1, 1000) AS n")

    def lags() -> bool:
        confirm()
        cursor.execute("SELECT coalesce(max(extract(epoch FROM replay_lag)), 0) FROM pg_stat_replication")
        return bool(cursor.fetchone()[0] > 0)

    until(lags)
    database.initialize(connect_to(url))
    try:
        assert read_health(['"orders"']).replication_lag_s == 0.0
    finally:
        database.close()
        database.initialize(postgres)
        session.close()


def test_replication_lag_is_unknown_to_an_unprivileged_role(
    settings: Settings, application_url: str, postgres: Database, standby: Callable[[], None], admin: Connection
) -> None:
    role = settings.namespace
    with admin.cursor() as cursor:
        cursor.execute(f"CREATE ROLE {role} LOGIN PASSWORD 'x'")
    try:
        database.initialize(connect_to(f"{application_url}&user={role}&password=x"))

        signs = read_health(OURS)

        database.close()
        assert (signs.replication_lag_s, signs.waiting_locks, signs.trouble) == (None, 0, None)
    finally:
        database.initialize(postgres)
        with admin.cursor() as cursor:
            cursor.execute(f"DROP ROLE {role}")
