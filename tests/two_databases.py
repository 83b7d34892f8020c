"""``--topology=two-databases``: workers and leases of tests are in the database `SECOND`, and ``main`` is another.

What the library does for a worker must reach the worker's database, and everything else ``main``. In the thread of a
test, `SECOND` is the current database, so that the test itself sees the worker's rows.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final
from uuid import uuid4

import psycopg2

from housekeeping.core.settings import MAIN, Settings
from housekeeping.database.connection import connect_to, database
from housekeeping.leases.lease import ExclusiveLease
from housekeeping.sweeps.declaration import Sweep
from housekeeping.sweeps.ledger import schema
from tests.spare_schema import SpareSchema

SECOND: Final = "second"


def declare_in_second_database() -> None:
    """Let all sweeps and leases have the database `SECOND`, also those that are declared later and name none."""
    for declared in (Sweep, ExclusiveLease):
        defaults: Any = declared.__init__.__kwdefaults__
        assert defaults["database"] == MAIN
        defaults["database"] = SECOND
    for sweep in [each for each in gc.get_objects() if isinstance(each, Sweep)]:
        object.__setattr__(sweep, "database", SECOND)


class OtherDatabase:
    """A database of its own on the tests' server.

    Parameters:
      server_url: URL of another database of the server.
    """

    def __init__(self, server_url: str) -> None:
        self._admin = psycopg2.connect(server_url)
        self._admin.autocommit = True
        self._name = f"main_{uuid4().hex[:12]}"
        with self._admin.cursor() as cursor:
            cursor.execute(f"CREATE DATABASE {self._name}")
        parts = self._admin.info
        user = f"{parts.user}:{parts.password}@" if parts.password else f"{parts.user}@"
        self.url: Final = f"postgresql://{user}/{self._name}?host={parts.host}&port={parts.port}"
        self._spare = SpareSchema(self.url)

    @contextmanager
    def used_as(self, name: str, settings: Settings) -> Iterator[None]:
        """Give this database a name, and the library's tables, while a test runs."""
        self._spare.give(settings.schema_name)
        with database.using(name):
            database.initialize(connect_to(self.url_of(settings)))
            schema.init()
        self._spare.created(settings.schema_name)
        yield
        with database.using(name):
            if database.obj is not None:
                database.obj.close()
            database.initialize(None)
        self._spare.take_back(settings.schema_name)

    def url_of(self, settings: Settings) -> str:
        """Return the URL for a test with these settings."""
        return f"{self.url}&options=-csearch_path%3D{settings.namespace}"

    def drop(self) -> None:
        """Remove the database."""
        self._spare.close()
        with self._admin.cursor() as cursor:
            cursor.execute(f"DROP DATABASE {self._name} WITH (FORCE)")
        self._admin.close()
