"""Fixtures of the tests on a real streaming replica: a primary of their own, replicas, and an application."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import redis
from dramatiq import MessageProxy
from psycopg2.extensions import connection as Connection

from housekeeping import Settings, install
from tests.conftest import Urls
from tests.integration.database.replicas.standby import Standby
from tests.integration.middleware.step_worker import StepWorker, close
from tests.internals.brokers import message_broker
from tests.internals.database import Database, WalPosition, database
from tests.internals.embedded import embedded
from tests.internals.middleware import DataConsistency
from tests.rabbitmq_look import on_rabbitmq, watched


@pytest.fixture(scope="session")
def urls() -> Iterator[Urls]:
    """Servers of their own: not every PostgreSQL that a test may use lets itself be replicated."""
    with embedded.start() as servers:
        yield Urls(servers.database_url, servers.redis_url)


@pytest.fixture(scope="session")
def make_standby(urls: Urls) -> Iterator[Callable[[], Standby]]:
    with ExitStack() as stack:

        def make() -> Standby:
            # A short path, for a socket's name may not be long.
            standby = Standby(urls.database, Path(tempfile.mkdtemp(prefix="housekeeping-standby-", dir="/tmp")))
            stack.callback(standby.remove)
            return standby

        yield make


@pytest.fixture(scope="session")
def shared_standby(make_standby: Callable[[], Standby]) -> Standby:
    return make_standby()


@pytest.fixture
def standby(shared_standby: Standby) -> Iterator[Standby]:
    """A replica that replays what it receives, also after the test."""
    yield shared_standby
    shared_standby.go_on()


@pytest.fixture
def doomed_standby(make_standby: Callable[[], Standby]) -> Standby:
    """A replica that the test may promote or kill."""
    return make_standby()


@dataclass(frozen=True)
class Application:
    """A broker with the library's middleware, a table with notes, and a worker whose steps the test takes.

    Attributes:
      primary: A cursor on the primary, in autocommit.
    """

    broker: Any
    step_worker: StepWorker
    primary: Any
    caplog: pytest.LogCaptureFixture

    def write(self, note: str) -> None:
        self.primary.execute("INSERT INTO notes VALUES (%s)", (note,))

    def run(self, message: MessageProxy | None = None) -> str:
        """Process the next message, and say where it read."""
        self.step_worker.run(message)
        used: str = self.lines("Run ended")[-1]["data_consistency_used"]
        return used

    def lines(self, event: str) -> list[dict[str, Any]]:
        """The log lines of an event so far."""
        return [record.__dict__ for record in self.caplog.records if record.message == event]

    def position(self) -> WalPosition:
        """Where the primary's log is."""
        position = self.consistency._positions.current()
        assert position is not None
        return position

    @property
    def consistency(self) -> DataConsistency:
        return next(one for one in self.broker.middleware if isinstance(one, DataConsistency))


MakeApplication = Callable[..., Application]


@pytest.fixture
def make_application(
    postgres: Database,
    settings: Settings,
    redis_client: redis.Redis,
    admin: Connection,
    caplog: pytest.LogCaptureFixture,
) -> Iterator[MakeApplication]:
    """Makes the application, reading from these replicas; other settings by name."""
    caplog.set_level(logging.DEBUG)  # runs of plain actors are logged at this level
    with ExitStack() as stack, admin.cursor() as primary:
        primary.execute("CREATE TABLE notes (note text)")

        def make(*replicas: str, **more: Any) -> Application:
            own_schema = f"&options=-csearch_path%3D{settings.namespace}"
            given = settings.model_copy(update={"replica_urls": tuple(url + own_schema for url in replicas), **more})
            broker: Any = message_broker(given)
            stack.callback(close, broker)
            install(broker, given, workers=False)
            if on_rabbitmq(broker):
                broker.client = redis_client  # where the keys are
                watched(broker)
            stack.callback(database.close)
            application = Application(broker, StepWorker(broker), primary, caplog)
            consistency = application.consistency
            stack.callback(consistency._positions.close)
            for replica in consistency._replicas._all:
                stack.callback(replica.close)
            return application

        yield make
