"""Fixtures for pytest, available as soon as the library is installed. All names begin with ``housekeeping_``.

Nothing is started or imported before a test uses a fixture, so the imports are inside the fixtures.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final, Literal
from uuid import uuid4

import pytest

if TYPE_CHECKING:
    import redis
    from dramatiq import Broker, Worker
    from psycopg2.extensions import connection as Connection

    from housekeeping.core.settings import Settings
    from housekeeping.database.connection import Database
    from housekeeping.sweeps.declaration import Sweep
    from housekeeping.testing.stubs import ManualClock, MemoryLeaseStore

#: Environment variables that name servers to use instead of embedded ones.
DATABASE_URL: Final = "HOUSEKEEPING_TEST_DATABASE_URL"
REDIS_URL: Final = "HOUSEKEEPING_TEST_REDIS_URL"
_PREFIX: Final = "HOUSEKEEPING_"
_LOCK_MS: Final = 10_000  # wait for open transactions of a finished test


@pytest.fixture(scope="session")
def housekeeping_postgres_url() -> Iterator[str]:
    """URL of PostgreSQL: ``HOUSEKEEPING_TEST_DATABASE_URL``, otherwise of a server for this test session."""
    yield from _server_url(DATABASE_URL, "postgres")


@pytest.fixture(scope="session")
def housekeeping_redis_url() -> Iterator[str]:
    """URL of Redis: ``HOUSEKEEPING_TEST_REDIS_URL``, otherwise of a server for this test session."""
    yield from _server_url(REDIS_URL, "redis")


def _server_url(variable: str, server: Literal["postgres", "redis"]) -> Iterator[str]:
    if given := os.getenv(variable):
        yield given
        return
    from housekeeping import embedded
    from housekeeping.core.errors import HousekeepingError

    try:
        servers = embedded.start(postgres=server == "postgres", redis=server == "redis")
    except HousekeepingError as error:
        pytest.fail(f"{error}; or set {variable}", pytrace=False)
    with servers:
        yield servers.database_url if server == "postgres" else servers.redis_url


@pytest.fixture
def housekeeping_settings(
    housekeeping_postgres_url: str, housekeeping_redis_url: str, _housekeeping_administrator: _Administrator
) -> Iterator[Settings]:
    """Settings for one test: two schemas (an empty one for the application and the library's) and a key prefix.

    Other settings have their defaults; the environment and ``.env`` files are ignored. The application's schema is the
    search path of ``database_url``. Both schemas are removed after the test.
    """
    import psycopg2

    from housekeeping.core.settings import Settings

    name = f"test_{uuid4().hex[:12]}"
    separator = "&" if "?" in housekeeping_postgres_url else "?"
    settings = Settings(
        database_url=f"{housekeeping_postgres_url}{separator}options=-csearch_path%3D{name}",
        redis_url=housekeeping_redis_url,
        namespace=name,
        schema_name=f"{name}_own",
    )
    _housekeeping_administrator.execute(housekeeping_postgres_url, f"CREATE SCHEMA IF NOT EXISTS {name}")
    yield settings
    try:
        _housekeeping_administrator.execute(
            housekeeping_postgres_url,
            f"SET lock_timeout = {_LOCK_MS}; "
            f"DROP SCHEMA IF EXISTS {name} CASCADE; DROP SCHEMA IF EXISTS {name}_own CASCADE",
        )
    except psycopg2.errors.LockNotAvailable:
        pytest.fail(
            "the test has left a transaction open, so its tables are locked and cannot be removed", pytrace=False
        )


@pytest.fixture(scope="session")
def _housekeeping_administrator() -> Iterator[_Administrator]:
    """Yield one connection for all tests of the session, because connecting takes longer than the statements."""
    administrator = _Administrator()
    yield administrator
    administrator.close()


class _Administrator:
    def __init__(self) -> None:
        self._open: tuple[str, Connection] | None = None

    def execute(self, url: str, statements: str) -> None:
        """Execute repeatable statements, on a new connection if the last one is lost."""
        import psycopg2

        if self._open is None or self._open[0] != url:
            self._connect(url)
        try:
            self._run(statements)
        except psycopg2.errors.LockNotAvailable:
            raise
        except psycopg2.Error:  # a test has restarted or replaced the server
            self._connect(url)
            self._run(statements)

    def close(self) -> None:
        if self._open is not None:
            self._open[1].close()
            self._open = None

    def _connect(self, url: str) -> None:
        import psycopg2

        self.close()
        connection = psycopg2.connect(url)
        connection.autocommit = True
        self._open = url, connection

    def _run(self, statements: str) -> None:
        assert self._open is not None
        with self._open[1].cursor() as cursor:
            cursor.execute(statements)


@pytest.fixture
def housekeeping_database(housekeeping_settings: Settings) -> Iterator[Database]:
    """The library's database handle on this test's schemas, with the library's own tables created.

    Tables of the application: ``housekeeping_database.create_tables([Session])``. The tables of the library are also
    created in each database of the setting `databases`.
    """
    from housekeeping.database.connection import close_databases, connect_to, database
    from housekeeping.ledger import schema
    from housekeeping.ledger.schema import Run

    before, own = database.obj, str(Run._meta.schema)
    handle = connect_to(housekeeping_settings.require_database_url())
    database.initialize(handle)
    schema.use_schema(housekeeping_settings.schema_name)
    schema.init()
    others = housekeeping_settings.databases
    for name, url in others.items():
        with database.using(name):
            database.initialize(connect_to(url))
            schema.init()
    yield handle
    close_databases()
    handle.close()
    for name in others:
        with database.using(name):
            database.initialize(None)
    database.initialize(before)
    schema.use_schema(own)


@pytest.fixture
def housekeeping_redis(housekeeping_settings: Settings) -> Iterator[redis.Redis]:
    """Redis client that leases and middleware use too; this test's keys are removed after the test."""
    from housekeeping.core.redis import redis_client, shared_redis

    namespace = housekeeping_settings.namespace
    client = redis_client(housekeeping_settings.require_redis_url())
    before = dict(vars(shared_redis))
    shared_redis.use(client, namespace)
    yield client
    keys = list(client.scan_iter(match=f"{namespace}:*", count=1000))
    if keys:
        client.delete(*keys)
    client.close()
    vars(shared_redis).update(before)


@pytest.fixture
def housekeeping_sweeps() -> Sequence[Sweep]:
    """Sweeps to declare on `housekeeping_broker`; empty unless a test module overrides this fixture."""
    return ()


@pytest.fixture
def housekeeping_broker(
    housekeeping_settings: Settings,
    housekeeping_database: Database,
    housekeeping_redis: redis.Redis,
    housekeeping_sweeps: Sequence[Sweep],
) -> Iterator[Broker]:
    """Redis broker for one test with the library installed, without the built-in workers; not Dramatiq's global one.

    To send: ``housekeeping_broker.get_actor("sessions.expired").send()``.
    """
    from dramatiq.brokers.redis import RedisBroker

    import housekeeping
    from housekeeping.core.redis import redis_client, shared_redis
    from housekeeping.database.connection import database
    from housekeeping.sweeps import send

    registered = list(send._actors.values())  # of an application in this process
    client = redis_client(housekeeping_settings.require_redis_url())
    broker = RedisBroker(client=client, namespace=f"{housekeeping_settings.namespace}:broker")
    housekeeping.install(broker, housekeeping_settings, workers=False, sweeps=housekeeping_sweeps)
    installed = shared_redis.get()
    # Use the test's handle, which closes the connections of this thread.
    database.initialize(housekeeping_database)
    yield broker
    send.forget_all()
    for actor in registered:
        send.remember(actor)
    for each in (client, installed):
        each.connection_pool.disconnect()


@pytest.fixture
def housekeeping_worker(housekeeping_broker: Broker) -> Iterator[Worker]:
    """Dramatiq worker in threads of this process for `housekeeping_broker`.

    To wait until all messages are processed: ``housekeeping_broker.join(actor.queue_name)``, then
    ``housekeeping_worker.join()``.
    """
    from dramatiq import Worker

    worker = Worker(housekeeping_broker, worker_timeout=20, worker_threads=2)
    housekeeping_broker.emit_after("process_boot")
    worker.start()
    yield worker
    worker.stop()


@pytest.fixture
def housekeeping_environment(housekeeping_settings: Settings) -> dict[str, str]:
    """Environment for a process, such as a command, that uses this test's schemas and keys."""
    kept = {name: value for name, value in os.environ.items() if not name.upper().startswith(_PREFIX)}
    return kept | {
        f"{_PREFIX}DATABASE_URL": housekeeping_settings.require_database_url(),
        f"{_PREFIX}REDIS_URL": housekeeping_settings.redis_url or "",
        f"{_PREFIX}NAMESPACE": housekeeping_settings.namespace,
        f"{_PREFIX}SCHEMA": housekeeping_settings.schema_name,
    }


@pytest.fixture
def housekeeping_clock() -> ManualClock:
    """Clock that only moves when it is advanced."""
    from housekeeping.testing.stubs import ManualClock

    return ManualClock()


@pytest.fixture
def housekeeping_lease_store(housekeeping_clock: ManualClock) -> MemoryLeaseStore:
    """Lease store in memory, timed by `housekeeping_clock`: ``ExclusiveLease(key, ttl, housekeeping_lease_store)``."""
    from housekeeping.testing.stubs import MemoryLeaseStore

    return MemoryLeaseStore(housekeeping_clock)
