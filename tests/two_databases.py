"""``--topology=two-databases``: workers and leases of tests are in the database `SECOND`, and ``main`` is another.

What the library does for a worker must reach the worker's database, and everything else ``main``. In the thread of a
test, `SECOND` is the current database, so that the test itself sees the worker's rows.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final
from uuid import uuid4

import psycopg2

from housekeeping import ExclusiveLease, Settings, Sweep
from tests.internals.database import connect_to, database
from tests.internals.engine import PurgeRequest
from tests.internals.ledger import schema
from tests.spare_schema import SpareSchema

SECOND: Final = "second"
#: Tests of plain actors, of replicas and of the action log, which belong to ``main``: there the other database is
#: `SECOND`, and unused.
OF_MAIN: Final = (
    "tests/integration/middleware/schedule/",
    "tests/integration/middleware/test_lost_leases.py",
    "tests/integration/middleware/test_completions.py",
    "tests/integration/database/replicas/",
    "tests/integration/sweeps/ledger/test_action_log.py",
)
#: Tests of sweeps among them.
_OF_SWEEPS: Final = (
    "/schedule/test_setup.py::",
    "::test_tick_of_a_sweep_without_a_row_failed_once_the_database_returns",
    "::test_failed_sweep_with_its_own_row_has_one_row",
    "::test_skipped_tick_without_a_record_is_retried",
)
_CONNECTS: Final = "the test connects to the one database of its settings by itself"
_THREADS: Final = "threads of the test use the current database, which is main there"
_COUNTS: Final = "the test counts what an installation with one database has"
_NAMES: Final = "the test names what is in the only database"
_CHANGES: Final = "the test changes the only database, which has the leases; here they are in main"
#: Tests that need one database, with the reason.
ONE_DATABASE: Final = {
    "tests/integration/costs/": _COUNTS,
    "tests/integration/database/test_connection.py::": _CONNECTS,
    "tests/integration/database/test_transactions.py": _CONNECTS,
    "tests/integration/database/replicas/test_scheduler.py": "the sweep of the test reads from replicas of main",
    "tests/integration/doctor/test_doctor.py": _NAMES,
    "tests/integration/doctor/test_locked_tables.py": _NAMES,
    "tests/integration/leases/test_fences.py::test_an_applications_own_connection": _CONNECTS,
    "tests/integration/leases/test_fences.py::test_fenced_lease_without_a_database": _CONNECTS,
    "tests/integration/leases/test_fences.py::test_lease_is_released_if": _THREADS,
    "tests/integration/leases/test_fencing_tokens.py": _THREADS,
    "tests/integration/leases/test_without_redis.py::test_lease_on_a_standby": _CHANGES,
    "tests/integration/leases/test_without_redis.py::test_lease_without_the_schema": _CHANGES,
    "tests/integration/middleware/interrupts/test_statements.py": _THREADS,
    "tests/integration/own_sweeps/test_installed.py": _COUNTS,
    "tests/integration/sweeps/engine/test_batch_sizing.py::test_batch_whose_locks": _CONNECTS,
    "tests/integration/sweeps/engine/test_second_deliveries.py": _THREADS,
    "tests/integration/sweeps/insight/test_forecast.py::test_lease_of_a_running": _NAMES,
    "tests/integration/sweeps/ledger/test_history.py": _NAMES,
    "tests/integration/sweeps/ledger/test_lease_admin.py": _CONNECTS,
    "tests/integration/sweeps/ledger/test_schema.py": _CONNECTS,
    "tests/integration/sweeps/limits/test_db_health.py": _CONNECTS,
    "tests/integration/sweeps/limits/test_sick_database.py": _CONNECTS,
    "tests/integration/sweeps/partitions/test_concurrent.py::test_database_refuses": _THREADS,
    "tests/integration/web/test_pages.py": _NAMES,
    "tests/integration/web/test_plan_and_run.py::test_run_is_confirmed": _NAMES,
    "tests/integration/web/test_snapshot_reader.py": _NAMES,
    "tests/integration/workers/bulk_imports/test_other_tables.py": _CONNECTS,
    "tests/integration/workers/batched_git_ref_updates/test_tables.py": _CONNECTS,
    "tests/integration/workers/ci_stuck_builds/test_tables_and_sessions.py": _CONNECTS,
}


def is_of_main(nodeid: str) -> bool:
    """Return whether a test is about ``main``."""
    return nodeid.startswith(OF_MAIN) and not any(part in nodeid for part in _OF_SWEEPS)


def _with_second_database(create: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(create)
    def in_second_database(self: object, *args: Any, **given: Any) -> None:
        create(self, *args, **{"database": SECOND, **given})

    return in_second_database


def declare_in_second_database() -> None:
    """Let all sweeps, purges and leases have the database `SECOND`, also those declared later that name none."""
    for declared in (Sweep, PurgeRequest, ExclusiveLease):
        declared.__init__ = _with_second_database(declared.__init__)  # type: ignore[method-assign]
    for sweep in [each for each in gc.get_objects() if isinstance(each, Sweep)]:
        object.__setattr__(sweep, "database", SECOND)


class OtherDatabase:
    """A database of its own on the tests' server.

    Parameters:
      server_url: URL of another database of the server.
      encoding: Of its texts.
    """

    def __init__(self, server_url: str, encoding: str = "UTF8") -> None:
        self._admin = psycopg2.connect(server_url)
        self._admin.autocommit = True
        self._name = f"main_{uuid4().hex[:12]}"
        with self._admin.cursor() as cursor:
            cursor.execute(f"CREATE DATABASE {self._name} TEMPLATE template0 LOCALE 'C' ENCODING '{encoding}'")
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
