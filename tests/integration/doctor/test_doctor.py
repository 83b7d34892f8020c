"""Diagnostics of the `doctor` command."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from urllib.parse import quote

import psycopg2
import pytest
from psycopg2.extensions import connection as Connection

from housekeeping import Settings
from tests.command_processes import CommandProcesses
from tests.integration.doctor.conftest import Found
from tests.internals.core import PREFIX, how_to_install, redis_client
from tests.internals.database import Database, connect_to, database
from tests.internals.doctor import _memory, _persistence, doctor, servers
from tests.internals.ledger import Heartbeat, PostgresHeartbeats, Run, use_database
from tests.internals.workers import configured_sweeps
from tests.pgbouncer_server import PgBouncer
from tests.session_settings import set_in_session


def said(found: Found, *levels: str) -> list[tuple[str, str]]:
    """Return the findings of these levels, except those about the shared test servers."""
    return [(each.area, each.subject) for each in found(*levels) if (each.area, each.subject) not in SERVERS]


#: Other tests use the servers at the same time, and no process is alive.
SERVERS = [
    ("processes", "worker"),
    ("processes", "scheduler"),
    ("redis", "persistence"),
    ("redis", "company"),
    ("postgres", "long transactions"),
]


def test_complete_installation_has_no_problems(found: Found) -> None:
    assert said(found, "warning", "error") == []
    assert len(said(found, "fine")) > 20


def test_missing_worker_and_scheduler_are_warnings(found: Found) -> None:
    texts = {each.subject: each.text for each in found("warning") if each.area == "processes"}

    assert texts == {
        "worker": "no worker has sent a heartbeat yet: start `housekeeping worker`",
        "scheduler": "no scheduler has sent a heartbeat yet: start `housekeeping scheduler`",
    }


@pytest.mark.parametrize(("is_stopped", "names"), [(False, ["a:8"]), (True, [])])
def test_serve_beside_redis_is_an_error(found: Found, is_stopped: bool, names: list[str]) -> None:
    beat = Heartbeat(kind="scheduler", host="a", pid=8, version="1", up_s=60.0, stopped=is_stopped)
    PostgresHeartbeats().write("serve", beat)

    errors = [each.text for each in found("error") if (each.area, each.subject) == ("processes", "serve")]

    assert [text.partition(" runs without Redis")[0] for text in errors] == names


INDEXES = {
    "index_user_statuses_on_clear_status_at_not_null": "user_status_cleanup.batch",
    "index_bulk_imports_on_updated_at_and_id_for_stale": "bulk_imports.stale_import",
    "index_bulk_import_entities_on_updated_at_and_id_for_stale": "bulk_imports.stale_import",
    "index_ci_builds_on_status_and_created_at_and_project_id": "ci.stuck_builds.drop_pending",
    "index_batched_git_ref_updates_deletions_on_project_id_pending": "batched_git_ref_updates.cleanup_scheduler",
}


def test_missing_indexes_are_reported_with_their_create_statements(
    found: Found, admin: Connection, settings: Settings
) -> None:
    with admin.cursor() as cursor:
        cursor.execute(f"SET search_path TO {settings.namespace}")
        cursor.execute(f"DROP INDEX {', '.join(INDEXES)}")

    missing = [each for each in found("warning") if each.subject == "indexes"]

    given = {(each.area, statement) for each in missing for statement in str(each.way_out).split("; ")}
    for index, worker in INDEXES.items():
        [statement] = [
            text for area, text in given if area == worker and f'CREATE INDEX CONCURRENTLY "{index}"' in text
        ]
        with admin.cursor() as cursor:
            cursor.execute(statement)
    assert [each for each in found("warning") if each.subject == "indexes"] == []


def test_missing_table_is_an_error_that_names_the_setting(found: Found, postgres: Database) -> None:
    postgres.execute_sql("DROP TABLE ci_builds")

    (missing,) = [each for each in found("error") if each.subject == "table ci_builds"]

    assert missing.way_out is not None and '["tables"]' in missing.way_out


def test_table_with_autovacuum_off_is_a_warning(found: Found, postgres: Database) -> None:
    off = {"ci_builds": "off", "user_statuses": "false", "bulk_imports": "no", "batched_git_ref_updates_deletions": "0"}
    for table, word in off.items():
        postgres.execute_sql(f"ALTER TABLE {table} SET (autovacuum_enabled = {word})")

    texts = {each.subject: each.text for each in found("warning") if each.subject.startswith("autovacuum on ")}

    assert texts.keys() == {f"autovacuum on {table}" for table in off}
    assert all("is off" in text for text in texts.values())


def test_table_with_other_options_has_autovacuum_on(found: Found, postgres: Database) -> None:
    postgres.execute_sql("ALTER TABLE ci_builds SET (autovacuum_enabled = on, fillfactor = 90)")

    assert [each for each in found("warning") if each.subject == "autovacuum on ci_builds"] == []


def test_missing_schema_is_an_error_and_other_checks_run(found: Found, settings: Settings, admin: Connection) -> None:
    with admin.cursor() as cursor:
        cursor.execute(f"DROP SCHEMA {settings.schema_name} CASCADE")

    assert said(found, "error") == [("postgres", "schema")]
    assert ("ci.stuck_builds.drop_pending", "table ci_builds") in said(found, "fine")


@pytest.fixture
def long_ago(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servers, "LONG", timedelta())


def test_long_transaction_is_reported_with_its_remedy(found: Found, application_url: str, long_ago: None) -> None:
    with psycopg2.connect(application_url, application_name="a night's report") as other:
        with other.cursor() as cursor:
            cursor.execute("SELECT 1")

        findings = [each for each in found("warning") if "a night's report" in each.text]

        assert [each.way_out for each in findings] == [
            "VACUUM cannot remove newer deleted rows until it ends; "
            f"to end it: SELECT pg_terminate_backend({other.info.backend_pid})"
        ]
    other.close()


def test_read_only_server_is_an_error(found: Found, complete: Settings, tables: None) -> None:
    set_in_session(database, "default_transaction_read_only = on")

    assert ("postgres", "writing") in said(found, "error")


def test_missing_time_limit_is_a_warning_with_the_defaults(found: Found, complete: Settings, tables: None) -> None:
    (fine,) = [each.text for each in found("fine") if each.subject == "timeouts"]
    set_in_session(database, "statement_timeout = 0")

    (warning,) = [each for each in found("warning") if each.subject == "timeouts"]

    assert warning.text.startswith("statement_timeout off")
    defaults = [f"{60 if unit == 'min' else value} s" for value, unit in re.findall(r"(\d+)(s|min)", fine)]
    assert str(warning.way_out).endswith(f"defaults: {', '.join(defaults)}")


@pytest.mark.parametrize(
    ("information", "level"),
    [
        ({"maxmemory": 0, "maxmemory_policy": "allkeys-lru"}, "fine"),
        ({"maxmemory": 10, "maxmemory_policy": "noeviction", "used_memory": 8}, "fine"),
        ({"maxmemory": 10, "maxmemory_policy": "noeviction", "used_memory": 9.5}, "warning"),
        ({"maxmemory": 10, "maxmemory_policy": "noeviction", "used_memory": 10}, "error"),
        ({"maxmemory": 10, "maxmemory_policy": "volatile-ttl", "used_memory": 1}, "error"),
    ],
)
def test_redis_that_evicts_keys_is_an_error(settings: Settings, information: dict[str, object], level: str) -> None:
    (finding,) = _memory(redis_client(settings.require_redis_url()), information)

    assert finding.level == level


def test_append_only_redis_is_fine() -> None:
    assert [each.level for each in _persistence({"aof_enabled": 1})] == ["fine"]


@pytest.mark.parametrize("information", [{"rdb_saves": 0}, {"rdb_saves": 3}, {}])
def test_redis_without_append_only_file_is_a_warning(information: dict[str, object]) -> None:
    (finding,) = _persistence({"aof_enabled": 0, "rdb_last_save_time": 1, **information})

    assert (finding.level, "lost with the server" in finding.text) == ("warning", True)


@pytest.mark.parametrize(
    ("url", "area", "other"),
    [
        ({"redis_url": "redis://127.0.0.1:1"}, "redis", "postgres"),
        ({"database_url": "postgresql://127.0.0.1:1/app"}, "postgres", "redis"),
    ],
)
def test_unavailable_server_is_one_error_and_other_checks_run(
    complete: Settings, tables: None, url: dict[str, str], area: str, other: str
) -> None:
    away = complete.model_copy(update=url)
    use_database(away)

    found = list(doctor.examine(away, configured_sweeps(away)))

    assert [(each.area, each.subject) for each in found if each.level == "error"] == [(area, "connection")]
    assert (other, "connection", "fine") in {(each.area, each.subject, each.level) for each in found}


def test_missing_rabbitmq_client_is_one_error(
    complete: Settings, tables: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.startswith("housekeeping.brokers.rabbitmq")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "pika", None)
    on_rabbitmq = complete.model_copy(update={"broker_url": "amqp://127.0.0.1:1"})

    found = list(doctor.examine(on_rabbitmq, configured_sweeps(on_rabbitmq)))

    assert [(each.area, each.text) for each in found if each.level == "error"] == [
        (
            "broker",
            f"HOUSEKEEPING_BROKER_URL names RabbitMQ, whose client pika is not installed: {how_to_install('rabbitmq')}",
        )
    ]
    assert ("postgres", "connection") in [(each.area, each.subject) for each in found]


def test_doctor_changes_nothing(found: Found, settings: Settings, statements: list[str]) -> None:
    client = redis_client(settings.require_redis_url())
    keys = set(client.scan_iter(match=f"{settings.namespace}:*"))

    found("fine")

    assert set(client.scan_iter(match=f"{settings.namespace}:*")) == keys
    assert Run.select().count() == 0
    reading = ("SELECT", "WITH", "EXPLAIN", "SET LOCAL", "SAVEPOINT", "RELEASE SAVEPOINT", "ROLLBACK TO SAVEPOINT")
    assert {sql for sql in statements if not sql.strip().startswith(reading)} == set()


@pytest.mark.parametrize(("length", "levels"), [(31, ["warning"]), (32, [])])
def test_short_web_token_is_a_warning(complete: Settings, length: int, levels: list[str]) -> None:
    settings = complete.model_copy(update={"web_token": "x" * length})

    assert [each.level for each in doctor.web_token(settings, {})] == levels


def test_pooler_in_transaction_mode_is_named(found: Found, complete: Settings, pooler: PgBouncer) -> None:
    direct = database.obj
    database.initialize(connect_to(pooler.through(complete.require_database_url())))
    try:
        through = [each.text for each in found("fine") if each.subject == "pooler"]
    finally:
        database.close()
        database.initialize(direct)

    assert through == ["transaction mode: limits are sent with each transaction, and no statements are prepared"]


@pytest.mark.direct_only(reason="it is about a direct connection")
def test_direct_connection_has_no_pooler(found: Found) -> None:
    assert [each for each in found("fine", "warning") if each.subject == "pooler"] == []


@pytest.fixture
def other_server(postgres: Database, settings: Settings, admin: Connection) -> Iterator[str]:
    """Let the server say that it is another one. Return the connection option with which it does."""
    with admin.cursor() as cursor:
        cursor.execute(
            f"CREATE FUNCTION {settings.namespace}.version() RETURNS text LANGUAGE sql AS "
            "$$ SELECT 'CockroachDB CCL v24.1.0 (x86_64-pc-linux-gnu)' $$"
        )
    yield f"-c search_path={settings.namespace},pg_catalog"


def test_server_that_only_speaks_the_protocol_is_an_error(found: Found, other_server: str, postgres: Database) -> None:
    set_in_session(postgres, other_server.removeprefix("-c ").replace("=", " TO "))

    texts = [(each.text, each.way_out) for each in found("error") if each.area == "postgres"]

    assert texts == [
        (
            "this server is CockroachDB: it lacks catalogs, locks and system columns of PostgreSQL that the batches "
            "need",
            "use PostgreSQL 13 or later",
        )
    ]


def test_init_refuses_a_server_that_only_speaks_the_protocol(
    other_server: str, environment: dict[str, str], command_processes: CommandProcesses, tmp_path: Path
) -> None:
    url = f"{PREFIX}DATABASE_URL"
    given = environment[url]
    options = f"{'&' if '?' in given else '?'}options={quote(other_server)}"

    done = command_processes.run(["init"], environment | {url: given + options}, tmp_path, timeout_s=60)

    assert done.returncode == 2
    assert done.stderr.strip().startswith("housekeeping: this server is CockroachDB: ")


@pytest.mark.parametrize(
    ("attributes", "level", "text"),
    [
        ("any", "warning", "the URL has 2 hosts, and a session may reach one that is only a replica"),
        ("read-write", "fine", "2 hosts; sessions use the one that accepts writes"),
    ],
)
def test_url_with_several_hosts_needs_the_one_that_accepts_writes(
    found: Found, postgres: Database, attributes: str, level: str, text: str
) -> None:
    host = postgres.connect_params["host"].partition(",")[0]
    postgres.connect_params |= {"host": f"{host},/nowhere", "target_session_attrs": attributes}

    assert [each.text for each in found(level) if each.subject == "failover"] == [text]
