"""``housekeeping uninstall`` removes only the library's objects, and nothing while the library is in use."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any, Final

import pytest
import redis
from click.testing import CliRunner, Result

from housekeeping import Settings
from tests.internals.cli import main
from tests.internals.database import Database
from tests.internals.ledger import NOW, Heartbeat, PostgresHeartbeats, RedisHeartbeats, Run, schema

#: Runs ``housekeeping uninstall`` with these options, and this answer to its question.
Uninstall = Callable[..., Result]
#: Keys of the application, one of them with a prefix that only begins like the namespace.
OTHERS: Final = ("{}2:key", "other:{}:key")


@pytest.fixture
def uninstall(
    environment: dict[str, str],
    settings: Settings,
    postgres: Database,
    redis_client: redis.Redis,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Uninstall]:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    others = [key.format(settings.namespace) for key in OTHERS]
    redis_client.mset({f"{settings.namespace}:{n}": "" for n in range(2500)} | dict.fromkeys(others, ""))
    redis_client.hset(f"{settings.namespace}:broker:cronjob.msgs", mapping={"1": "", "2": ""})

    def run(*options: str, answer: str = "") -> Result:
        return CliRunner().invoke(main, ["uninstall", *options], input=answer)

    yield run
    redis_client.delete(*others)


def keys_of(redis_client: redis.Redis, settings: Settings) -> int:
    return len(list(redis_client.scan_iter(f"{settings.namespace}:*", count=1000)))


def test_tables_and_keys_are_removed_and_what_stays_is_named(
    uninstall: Uninstall, settings: Settings, postgres: Database, redis_client: redis.Redis
) -> None:
    postgres.execute_sql("CREATE TABLE old_sessions (id int, archived_by_run bigint)")
    Run.insert(worker="w", trigger="cli", started_at=NOW, heartbeat_at=NOW, finished_at=NOW, outcome="done").execute()

    shown = json.loads(uninstall("--dry-run", "--json").stdout)
    assert (shown["removed"], keys_of(redis_client, settings), Run.select().count()) == (False, 2501, 1)
    done = uninstall("--yes", "--json")

    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout) == shown | {"removed": True}
    assert shown["databases"] == [{"database": "main", "schema": settings.schema_name, "runs": 1}]
    assert (shown["redis_keys"], shown["messages"]) == (2501, 2)
    assert any(line.startswith("archive ") and "old_sessions" in line for line in shown["left"])
    assert postgres.execute_sql("SELECT to_regnamespace(%s)", (settings.schema_name,)).fetchone() == (None,)
    assert postgres.table_exists("old_sessions")
    assert keys_of(redis_client, settings) == 0
    assert redis_client.exists(*(key.format(settings.namespace) for key in OTHERS)) == 2


@pytest.mark.parametrize("cut_off", ["schema", "keys"])
def test_interrupted_removal_is_repeated(
    uninstall: Uninstall, settings: Settings, postgres: Database, redis_client: redis.Redis, cut_off: str
) -> None:
    if cut_off == "schema":
        postgres.execute_sql(f"DROP SCHEMA {settings.schema_name} CASCADE")
    else:
        redis_client.delete(*redis_client.scan_iter(f"{settings.namespace}:*", count=1000))

    first, second = uninstall("--yes"), uninstall("--yes")

    assert (first.exit_code, second.exit_code) == (0, 0), first.output
    assert f"schema {settings.schema_name}: does not exist" in second.output
    assert keys_of(redis_client, settings) == 0


@pytest.mark.parametrize("kind", ["worker", "scheduler"])
@pytest.mark.parametrize("server", ["Redis", "PostgreSQL"])
@pytest.mark.parametrize("stopped", [False, True])
def test_living_process_prevents_the_removal(
    uninstall: Uninstall, settings: Settings, redis_client: redis.Redis, kind: Any, server: str, stopped: bool
) -> None:
    heartbeat = Heartbeat(kind=kind, host="a", pid=7, version="1", up_s=1, stopped=stopped)
    store = RedisHeartbeats(redis_client, settings.namespace) if server == "Redis" else PostgresHeartbeats()
    store.write("a:7", heartbeat)

    ended = uninstall("--yes")

    assert ended.exit_code == (0 if stopped else 2), ended.output
    assert (f"still at work: {kind} a:7; stop all workers" in ended.output) is not stopped
    assert (keys_of(redis_client, settings) == 0) is stopped


def test_installation_without_redis_is_removed(
    uninstall: Uninstall, settings: Settings, postgres: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HOUSEKEEPING_REDIS_URL")

    ended = uninstall("--yes")

    assert ended.exit_code == 0, ended.output
    assert postgres.execute_sql("SELECT to_regnamespace(%s)", (settings.schema_name,)).fetchone() == (None,)


def test_run_in_progress_prevents_the_removal(uninstall: Uninstall) -> None:
    run = Run.insert(worker="shop.old", trigger="cli", started_at=NOW, heartbeat_at=NOW).execute()

    refused = uninstall("--yes")

    assert (refused.exit_code, f"still at work: run {run} of shop.old;" in refused.output) == (2, True)
    schema.require()


def test_unavailable_redis_prevents_the_removal(uninstall: Uninstall, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOUSEKEEPING_REDIS_URL", "redis://:hunter2@localhost:1/0")

    refused = uninstall("--yes")

    assert refused.exit_code != 0 and "so running workers are unknown; nothing was removed" in refused.output
    assert "hunter2" not in refused.output
    schema.require()


@pytest.mark.parametrize(
    "statement",
    ["CREATE VIEW history AS SELECT id FROM {}.runs", "CREATE TABLE {}.own (id int)"],
    ids=["view elsewhere", "table in the schema"],
)
def test_dependent_objects_prevent_the_removal(
    uninstall: Uninstall, settings: Settings, postgres: Database, redis_client: redis.Redis, statement: str
) -> None:
    postgres.execute_sql(statement.format(settings.schema_name))

    refused = uninstall("--yes")

    assert (refused.exit_code, "depends on" in refused.output) == (2, True), refused.output
    assert "drop or move it first" in refused.output
    assert keys_of(redis_client, settings) == 2501
    schema.require()


@pytest.mark.parametrize(
    ("options", "answer", "text"),
    [
        ([], "n\n", "not confirmed; nothing was removed"),
        ([], "", "there is no terminal to confirm it on; nothing was removed; add --yes"),
        (["--json"], "", "--json does not ask for a confirmation"),
    ],
)
def test_unconfirmed_removal_removes_nothing(
    uninstall: Uninstall, settings: Settings, redis_client: redis.Redis, options: list[str], answer: str, text: str
) -> None:
    refused = uninstall(*options, answer=answer)

    assert refused.exit_code != 0 and text in refused.output
    assert keys_of(redis_client, settings) == 2501
    schema.require()
