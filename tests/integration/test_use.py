"""`housekeeping.use`: leases, fencing and runs of sweeps in processes without a broker."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import redis

import housekeeping
from housekeeping import Delete, ExclusiveLease, Limits, Row, Rows, Settings, Sweep, in_thread, run_sweep, shared_redis
from tests.integration.erasure import shop
from tests.internals.app import installation
from tests.internals.core import PREFIX, DeclarationError, SettingsError
from tests.internals.database import Database, database
from tests.internals.leases import PostgresLeaseStore, RedisLeaseStore
from tests.internals.ledger import Run

KEY, TTL = "reports", timedelta(minutes=10)

#: A process that has used its connection, and forks. Prints what the child and then the parent see.
_FORKER = """
import os
from datetime import timedelta
import housekeeping
from housekeeping import ExclusiveLease, current_database as database

def session():
    return database.execute_sql("SELECT pg_backend_pid()").fetchone()[0]

housekeeping.use()
mine = session()
lease = ExclusiveLease("parents", timedelta(minutes=10), fenced=True)
with lease:
    if os.fork() == 0:
        assert lease.lost and not lease.cancel()
        theirs = session()
        with ExclusiveLease("childs", timedelta(minutes=10), fenced=True) as own, database.atomic():
            own.fence()
        database.close()
        os._exit(theirs == mine)
    assert os.waitstatus_to_exitcode(os.wait()[1]) == 0
    assert session() == mine
    lease.check()
print("ok")
"""

#: A process that forks while another of its threads has the locks of a run.
_BUSY_FORKER = """
import os, signal, threading
from contextlib import ExitStack
import housekeeping
from housekeeping import Delete, Rows, Sweep
from housekeeping.core import interrupts
from housekeeping.database import catalog
from housekeeping.engine import failures, run

held, may_end = threading.Event(), threading.Event()

def hold(*locks):
    with ExitStack() as stack:
        for lock in locks:
            stack.enter_context(lock)
        held.set()
        may_end.wait(60)

housekeeping.use()
sweep = Sweep("tests.entries", Rows("entries", stale=lambda row: row.id > 0, order="id", action=Delete()))
locks = catalog._lock, run._open_runs_lock, failures._reporting, interrupts._lock, interrupts._reading_frames
holder = threading.Thread(target=hold, args=locks)
holder.start()
assert held.wait(60)
if os.fork() == 0:
    signal.alarm(30)
    os._exit(housekeeping.run_sweep(sweep).outcome != "done")
child = os.wait()[1]
may_end.set()
holder.join()
assert os.waitstatus_to_exitcode(child) == 0
print("ok")
"""


@pytest.fixture(autouse=True)
def unused(postgres: Database, settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process in which nothing was configured, whose environment names the database."""
    monkeypatch.setattr(installation, "_used", None)
    for name, value in {"client": None, "_namespace": None, "is_absent": False}.items():
        monkeypatch.setattr(shared_redis, name, value)
    monkeypatch.setenv(f"{PREFIX}DATABASE_URL", settings.require_database_url())
    monkeypatch.setenv(f"{PREFIX}SCHEMA", settings.schema_name)
    monkeypatch.setenv(f"{PREFIX}NAMESPACE", settings.namespace)


@pytest.fixture
def sweep() -> Sweep:
    database.execute_sql("CREATE TABLE entries (id bigint PRIMARY KEY)")
    database.execute_sql("INSERT INTO entries SELECT id FROM generate_series(1, 9) AS id")
    return Sweep(
        "tests.entries",
        Rows("entries", stale=is_due, order="id", action=Delete()),
        limits=Limits(batch=2, batch_takes=None),
    )


def is_due(row: Row) -> object:
    return row.id > 0


def test_url_of_the_database_suffices_for_leases_and_fences(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(f"{PREFIX}DATABASE_URL")

    housekeeping.use(Settings.load(database_url=settings.require_database_url()))

    with ExclusiveLease(KEY, TTL, fenced=True), database.atomic():
        housekeeping.fence()
        assert [key for key, _, _ in PostgresLeaseStore().held()] == [KEY]


def test_url_of_redis_puts_the_leases_there(settings: Settings, redis_client: redis.Redis) -> None:
    store = RedisLeaseStore(redis_client, settings.namespace)
    shared_redis.client = None

    housekeeping.use(redis_url=settings.require_redis_url())

    with ExclusiveLease(KEY, TTL, fenced=True), database.atomic():
        housekeeping.fence()
        assert [key for key, _, _ in store.held()] == [KEY]
    shared_redis.get().close()


def test_sweeps_of_the_settings_are_returned_with_their_limits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sweep: Sweep
) -> None:
    (tmp_path / "swept_by_use.py").write_text(
        "from tests.integration.test_use import is_due\n"
        "from housekeeping import Delete, Rows, Sweep\n"
        'SWEEPS = [Sweep("tests.entries", Rows("entries", stale=is_due, order="id", action=Delete()))]\n'
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv(f"{PREFIX}SWEEPS", "swept_by_use")
    monkeypatch.setenv(f"{PREFIX}WORKERS", '{"tests.entries": {"batch_size": 1, "target_batch_s": null}}')

    result = run_sweep(housekeeping.use()["tests.entries"], confirmed=True)

    assert (result.outcome, result.counts["deleted_rows"], result.counts["batches"]) == ("done", 9, 9)


def test_second_call_with_the_same_settings_keeps_connections() -> None:
    first = housekeeping.use()
    database.execute_sql("SELECT 1")

    assert housekeeping.use() == first
    assert not database.is_closed()
    database.close()


def other_database() -> None:
    housekeeping.use()
    housekeeping.use(database_url="postgresql:///another")


@pytest.mark.parametrize(
    ("call", "kind", "text"),
    [
        (other_database, DeclarationError, r"use\(\) was called before with other settings"),
        (
            lambda: housekeeping.use(Settings(), redis_url="redis://host"),
            DeclarationError,
            r"use\(\) has both settings and redis_url",
        ),
        (lambda: housekeeping.use(Settings()), SettingsError, "HOUSEKEEPING_DATABASE_URL is not set"),
        (lambda: housekeeping.use(redis_url="http://host"), SettingsError, "HOUSEKEEPING_REDIS_URL is 'http://host'"),
        (lambda: housekeeping.use() and shared_redis.get(), SettingsError, "HOUSEKEEPING_REDIS_URL is not set"),
    ],
)
def test_wrong_call_is_explained_in_one_line(call: Callable[[], object], kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=text) as raised:
        call()

    assert "\n" not in str(raised.value)


def test_requests_of_erasures_use_its_settings(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = ModuleType("subjects_of_use")
    module.SUBJECTS = (shop.PERSON,)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    shop.create()
    housekeeping.use(shop.with_key(settings, sweeps=(module.__name__,)))

    number = housekeeping.erase("person", shop.MARKER_ID)

    assert shop.row(number).state == "requested"


@pytest.mark.parametrize(
    "has_redis", [pytest.param(False, id="PostgreSQL", marks=pytest.mark.slow), pytest.param(True, id="Redis")]
)
def test_forked_process_has_connections_and_leases_of_its_own(
    environment: dict[str, str], has_redis: bool, redis_client: redis.Redis
) -> None:
    if not has_redis:
        environment = environment | {f"{PREFIX}REDIS_URL": "", f"{PREFIX}BROKER_URL": ""}

    assert_prints_ok(_FORKER, environment)


@pytest.mark.usefixtures("sweep")
def test_sweep_runs_in_a_process_forked_while_a_thread_has_the_locks(environment: dict[str, str]) -> None:
    assert_prints_ok(_BUSY_FORKER, environment)


def assert_prints_ok(script: str, environment: dict[str, str]) -> None:
    """Run a script in a new process, whose deprecation warnings about forks are ignored."""
    ended = subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", script],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )

    assert (ended.stdout, ended.returncode) == ("ok\n", 0), ended.stderr


def test_thread_that_had_no_connection_closes_its_own_after_a_run(sweep: Sweep) -> None:
    housekeeping.use()
    is_closed = list[bool]()

    def work() -> None:
        run_sweep(sweep, confirmed=True)
        is_closed.append(database.is_closed())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    database.execute_sql("SELECT 1")
    run_sweep(sweep)

    assert is_closed == [True]
    assert not database.is_closed()
    database.close()


def test_canceled_task_ends_its_run_after_the_next_batch(sweep: Sweep) -> None:
    # R5
    housekeeping.use()

    async def main() -> None:
        loop = asyncio.get_running_loop()
        committed, continues = threading.Event(), threading.Event()

        def wait(_: Any) -> None:
            committed.set()
            assert continues.wait(10)

        running = asyncio.create_task(in_thread(run_sweep, sweep, confirmed=True, on_batch=wait))
        await asyncio.to_thread(committed.wait, 10)
        running.cancel()
        loop.call_soon(loop.call_soon, continues.set)  # once the task has got it
        with pytest.raises(asyncio.CancelledError):
            await running

    asyncio.run(main())

    run = Run.get()
    assert (run.outcome, run.reason, run.counts["deleted_rows"]) == ("partial", "shutdown", 4)


def test_environment_alone_suffices_for_a_fenced_lease_in_redis(
    settings: Settings, redis_client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared_redis.client = None
    monkeypatch.setenv(f"{PREFIX}REDIS_URL", settings.require_redis_url())
    monkeypatch.setattr(database, "obj", None)

    with ExclusiveLease(KEY, TTL, fenced=True) as lease, database.atomic():
        lease.fence()
    database.close()
    shared_redis.get().close()
