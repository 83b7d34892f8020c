"""Fixtures every test may use. Servers start with the first test that asks for one.

Given ``HOUSEKEEPING_TEST_DATABASE_URL`` or ``HOUSEKEEPING_TEST_REDIS_URL``, those servers are used,
each test in schemas and under a key prefix of its own; nothing else of them is touched.
"""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Final

import psycopg2
import pytest
import redis
from psycopg2.extensions import connection as Connection

from housekeeping import Settings
from housekeeping.testing.stubs import ManualClock
from tests import citus_like, postgres_only, two_databases
from tests.citus_like import CitusLike, Cluster
from tests.command_processes import CommandProcesses
from tests.database_times import DatabaseTimes
from tests.failover_servers import synchronous_pair
from tests.internals.core import MAIN, PREFIX, shared_redis
from tests.internals.database import Database, database
from tests.internals.embedded import embedded
from tests.internals.ledger import schema
from tests.internals.testing import plugin
from tests.pgbouncer_server import PgBouncer, pgbouncer
from tests.rabbitmq_server import amqp_url as amqp_url
from tests.sentinel_servers import SentinelServers, sentinel_servers
from tests.spare_schema import SpareSchema
from tests.twins import running
from tests.twins.running import pytest_collection_modifyitems as pytest_collection_modifyitems
from tests.twins.running import pytest_generate_tests as pytest_generate_tests
from tests.twins.running import pytest_pyfunc_call as pytest_pyfunc_call
from tests.twins.running import twin as twin
from tests.two_databases import OtherDatabase

# The default collects so often that it is a twelfth of the processor time of the tests.
gc.set_threshold(100_000, 20, 100)


#: Topology -> the marker of tests that it leaves out.
_LEFT_OUT: Final = {"pgbouncer": "direct_only", "failover": "one_server_only", "sentinel": "plain_redis_only"}


def pytest_addoption(parser: pytest.Parser) -> None:
    running.add_option(parser)
    parser.addoption("--broker", choices=("redis", "rabbitmq"), default="redis", help="what carries the messages")
    parser.addoption(
        "--topology",
        choices=(
            *("direct", "pgbouncer", "failover", "sentinel", "two-databases", "rabbitmq-cluster", "postgres-only"),
            "citus-like",
        ),
        default="direct",
        help="what leads to the servers of the tests: a pooler or a URL of two hosts to PostgreSQL, or Sentinel to "
        "Redis; or that workers have another database than main; or that three nodes of RabbitMQ with quorum queues "
        "carry the messages; or that there is no Redis, and the database has the leases, ticks and heartbeats; or that "
        "the tables are distributed tables of Citus, or of a server that acts like it",
    )


def pytest_configure(config: pytest.Config) -> None:
    # A shell lets what it starts in the background pass over Ctrl-C, and so would the processes that tests interrupt.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if config.getoption("topology") == "rabbitmq-cluster":
        config.option.broker = "rabbitmq"
    if config.getoption("topology") == "two-databases":
        two_databases.declare_in_second_database()
    # Where this tree is not the one that is installed, as in a copy of it.
    if not config.pluginmanager.is_registered(plugin):
        config.pluginmanager.register(plugin, "housekeeping")


@dataclass(frozen=True)
class Urls:
    database: str
    redis: str


@pytest.fixture(autouse=True)
def no_settings_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ:
        if name.startswith(PREFIX) and not name.startswith((f"{PREFIX}TEST_", f"{PREFIX}EMBEDDED")):
            monkeypatch.delenv(name)


@pytest.fixture(autouse=True)
def no_database_of_another_test() -> Iterator[None]:
    yield
    for name in database.by_name():
        with database.using(name):
            database.initialize(None)
    schema.use_schema(Settings.model_fields["schema_name"].default)  # a command within the test may have changed it


@pytest.fixture(scope="session")
def sentinels() -> Iterator[SentinelServers]:
    """A primary, its replica and three Sentinels, which no test of the session stops."""
    with sentinel_servers() as running:
        yield running


@pytest.fixture(scope="session")
def urls(request: pytest.FixtureRequest) -> Iterator[Urls]:
    """Where PostgreSQL and Redis are; embedded ones unless the environment names others.

    With ``--topology=sentinel``, Redis is the primary that the Sentinels name. With ``--topology=failover``,
    PostgreSQL is an embedded primary with a synchronous replica.
    """
    topology = request.config.getoption("topology")
    database_url = None if topology == "failover" else os.getenv("HOUSEKEEPING_TEST_DATABASE_URL")
    redis_url = os.getenv("HOUSEKEEPING_TEST_REDIS_URL")
    if topology == "sentinel":
        redis_url = request.getfixturevalue("sentinels").direct_url
    with ExitStack() as stack:
        if not (database_url and redis_url):
            servers = stack.enter_context(embedded.start(postgres=not database_url, redis=not redis_url))
        if topology == "failover":
            database_url = stack.enter_context(synchronous_pair(servers.database_url))
        yield Urls(database_url or servers.database_url, redis_url or servers.redis_url)


@pytest.fixture
def housekeeping_postgres_url(urls: Urls) -> str:
    """The kit's fixtures are on the server of the test's own folder, which may have another one."""
    return urls.database


@pytest.fixture
def housekeeping_redis_url(urls: Urls) -> str:
    return urls.redis


@pytest.fixture(scope="session")
def pooler(urls: Urls) -> Iterator[PgBouncer]:
    """A pooler in transaction mode in front of PostgreSQL."""
    with pgbouncer(urls.database) as running:
        yield running


@pytest.fixture
def housekeeping_settings(housekeeping_settings: Settings, request: pytest.FixtureRequest) -> Settings:
    """The kit's settings; with ``--topology``, the database is reached through a pooler, or Redis through Sentinel."""
    topology = request.config.getoption("topology")
    if topology == "rabbitmq-cluster":
        return housekeeping_settings.model_copy(update={"rabbitmq_queue_type": "quorum"})
    marker = request.node.get_closest_marker(_LEFT_OUT.get(topology, ""))
    if marker is not None:
        pytest.skip(marker.kwargs["reason"])
    if is_on_citus(request):
        if topology not in ("direct", "citus-like"):
            pytest.skip("the test has a proxy to PostgreSQL of its own")
        proxy: CitusLike | None = request.getfixturevalue("citus_proxy")
        url = housekeeping_settings.require_database_url()
        through = url if proxy is None else proxy.through(url)
        return housekeeping_settings.model_copy(update={"database_url": through})
    if topology == "postgres-only":
        return housekeeping_settings.model_copy(update={"redis_url": None})
    if topology == "sentinel":
        servers: SentinelServers = request.getfixturevalue("sentinels")
        if housekeeping_settings.redis_url != servers.direct_url:
            return housekeeping_settings  # the test's folder has servers of its own
        return housekeeping_settings.model_copy(update={"redis_url": servers.url})
    if topology != "pgbouncer":
        return housekeeping_settings
    pooler: PgBouncer = request.getfixturevalue("pooler")
    url = housekeeping_settings.require_database_url()
    if not pooler.leads_to(url):
        return housekeeping_settings  # the test's folder has a server of its own
    return housekeeping_settings.model_copy(update={"database_url": pooler.through(url)})


@pytest.fixture(autouse=True)
def left_out_with_this_topology(request: pytest.FixtureRequest) -> None:
    """Skip a test that its topology lists, with the reason."""
    listed = {
        "two-databases": two_databases.ONE_DATABASE,
        "postgres-only": postgres_only.NEEDS_REDIS,
        "citus-like": citus_like.LEFT_OUT,
    }
    for place, reason in listed.get(request.config.getoption("topology"), {}).items():
        begin, _, part = place.partition("*")
        if request.node.nodeid.startswith(begin) and part in request.node.nodeid:
            pytest.skip(reason)


@pytest.fixture(autouse=True)
def second_database_is_current(request: pytest.FixtureRequest, left_out_with_this_topology: None) -> Iterator[None]:
    """With ``--topology=two-databases``, the thread of the test uses the database of its workers."""
    if request.config.getoption("topology") != "two-databases":
        yield
        return
    marker = request.node.get_closest_marker("one_database_only")
    if marker is not None:
        pytest.skip(marker.kwargs["reason"])
    with database.using(MAIN if two_databases.is_of_main(request.node.nodeid) else two_databases.SECOND):
        yield


@pytest.fixture(scope="session")
def other_database(urls: Urls) -> Iterator[OtherDatabase]:
    """A second database; with ``--topology=two-databases``, the database ``main``."""
    other = OtherDatabase(urls.database)
    yield other
    other.drop()


@pytest.fixture
def clock(housekeeping_clock: ManualClock) -> ManualClock:
    return housekeeping_clock


@pytest.fixture(scope="session")
def administrators() -> Iterator[dict[str, Connection]]:
    """Connections beside the library's, by URL: to connect for each test takes longer than to clean up after one."""
    administrators: dict[str, Connection] = {}
    yield administrators
    for each in administrators.values():
        each.close()


def answers(connection: Connection) -> bool:
    try:
        connection.rollback()
        with connection.cursor() as cursor:
            cursor.execute("SELECT 1")
    except psycopg2.Error:
        return False
    return True


@pytest.fixture
def admin(urls: Urls, administrators: dict[str, Connection]) -> Iterator[Connection]:
    """A connection beside the library's, in autocommit; what a test has set or locked in it ends with the test."""
    admin = administrators.pop(urls.database, None)
    if admin is None or not answers(admin):  # another test has restarted the server
        admin = psycopg2.connect(urls.database)
    admin.autocommit = True
    yield admin
    try:
        admin.rollback()
        admin.autocommit = True
        with admin.cursor() as cursor:
            cursor.execute("DISCARD ALL")
    except psycopg2.Error:  # the test has closed it or restarted the server
        admin.close()
    else:
        admin.notices.clear()
        administrators[urls.database] = admin


@pytest.fixture
def times(admin: Connection) -> DatabaseTimes:
    """The database's times; the first is that of the fixture."""
    times = DatabaseTimes(admin)
    times.note()
    return times


@pytest.fixture
def broker_url(request: pytest.FixtureRequest) -> str | None:
    """RabbitMQ's URL with ``--broker=rabbitmq``; else none, and Redis carries the messages."""
    if request.config.getoption("broker") == "redis":
        return None
    marker = request.node.get_closest_marker("redis_broker_only")
    if marker is not None:
        pytest.skip(marker.kwargs["reason"])
    url: str = request.getfixturevalue("amqp_url")
    return url


@pytest.fixture
def settings(housekeeping_settings: Settings, broker_url: str | None, request: pytest.FixtureRequest) -> Settings:
    """Settings of this test's own: two empty schemas (the application's and the library's) and a key prefix."""
    settings = housekeeping_settings.model_copy(update={"broker_url": broker_url})
    if request.config.getoption("topology") != "two-databases":
        return settings
    other: OtherDatabase = request.getfixturevalue("other_database")
    main, second = other.url_of(settings), settings.require_database_url()
    if two_databases.is_of_main(request.node.nodeid):
        main, second = second, main
    return settings.model_copy(update={"database_url": main, "databases": {two_databases.SECOND: second}})


@pytest.fixture(scope="session")
def spare_schemas() -> Iterator[dict[str, SpareSchema]]:
    """Spare schemas by URL, because a folder of tests may have a server of its own."""
    spares: dict[str, SpareSchema] = {}
    yield spares
    for each in spares.values():
        each.close()


@pytest.fixture
def spare_schema(urls: Urls, spare_schemas: dict[str, SpareSchema]) -> SpareSchema:
    if urls.database not in spare_schemas:
        spare_schemas[urls.database] = SpareSchema(urls.database)
    return spare_schemas[urls.database]


@pytest.fixture
def library_schema(spare_schema: SpareSchema, housekeeping_settings: Settings) -> Iterator[None]:
    """Give the test the tables of the test before, empty; take them back after the test has closed its connections."""
    spare_schema.give(housekeeping_settings.schema_name)
    yield
    spare_schema.take_back(housekeeping_settings.schema_name)


@pytest.fixture
def housekeeping_database(
    library_schema: None,
    spare_schema: SpareSchema,
    housekeeping_settings: Settings,
    housekeeping_database: Database,
    request: pytest.FixtureRequest,
) -> Iterator[Database]:
    spare_schema.created(housekeeping_settings.schema_name)
    if request.config.getoption("topology") != "two-databases":
        yield housekeeping_database
        return
    other_name = two_databases.SECOND if two_databases.is_of_main(request.node.nodeid) else MAIN
    with request.getfixturevalue("other_database").used_as(other_name, housekeeping_settings):
        yield housekeeping_database


@pytest.fixture
def postgres(
    housekeeping_database: Database,
    settings: Settings,
    admin: Connection,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> Database:
    """The library's database handle, on this test's schemas, with the library's own tables made.

    On Citus, its `create_tables` distributes them, and runs need the Redis of their lease.
    """
    with admin.cursor() as cursor:
        cursor.execute(f"SET search_path TO {settings.namespace}")
    if is_on_citus(request):
        request.getfixturevalue("redis_client")
        cluster: Cluster = request.getfixturevalue("cluster")
        monkeypatch.setattr(housekeeping_database, "create_tables", cluster.creating(housekeeping_database))
    return housekeeping_database


def is_on_citus(request: pytest.FixtureRequest) -> bool:
    """Return whether the test's tables are distributed."""
    is_asked_for = request.config.getoption("topology") == "citus-like"
    return is_asked_for or request.node.get_closest_marker("on_citus") is not None


@pytest.fixture(scope="session")
def citus_proxy(urls: Urls) -> Iterator[CitusLike | None]:
    """A proxy that refuses what Citus refuses; None if the server has Citus."""
    if citus_like.has_citus(urls.database):
        yield None
        return
    with citus_like.proxy_of(urls.database) as proxy:
        yield proxy


@pytest.fixture
def cluster(admin: Connection, settings: Settings, citus_proxy: CitusLike | None) -> Cluster:
    """The distribution of the test's tables."""
    with admin.cursor() as cursor:
        cursor.execute(f"SET search_path TO {settings.namespace}")
    return Cluster(admin, citus_proxy)


@pytest.fixture
def redis_client(
    request: pytest.FixtureRequest, housekeeping_settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> redis.Redis:
    """A client, also the one that leases share; this test's keys are removed afterwards.

    With ``--topology=postgres-only``, leases are in the database of the settings, and any use of the client fails.
    """
    if request.config.getoption("topology") != "postgres-only":
        client: redis.Redis = request.getfixturevalue("housekeeping_redis")
        return client
    request.getfixturevalue("postgres")
    monkeypatch.setattr(shared_redis, "client", None)
    monkeypatch.setenv(f"{PREFIX}DATABASE_URL", housekeeping_settings.require_database_url())
    monkeypatch.setenv(f"{PREFIX}SCHEMA", housekeeping_settings.schema_name)
    there_is_none: redis.Redis = postgres_only.no_redis()
    return there_is_none


@pytest.fixture(scope="session")
def command_processes() -> Iterator[CommandProcesses]:
    """Processes that start commands faster than a new interpreter does."""
    processes = CommandProcesses()
    yield processes
    processes.close()


@pytest.fixture
def environment(
    housekeeping_environment: dict[str, str], housekeeping_settings: Settings, broker_url: str | None
) -> dict[str, str]:
    """The environment of a real process that is to work on this test's schemas and keys."""
    ours = {f"{PREFIX}BROKER_URL": broker_url or "", f"{PREFIX}LOG_FORMAT": "json"}
    if broker_url is not None:
        ours[f"{PREFIX}RABBITMQ_QUEUE_TYPE"] = housekeeping_settings.rabbitmq_queue_type
    # Without the size of a terminal: parallel tests have one in their environment, but no terminal.
    kept = {name: value for name, value in housekeeping_environment.items() if name not in ("COLUMNS", "LINES")}
    return kept | ours
