"""``housekeeping uninstall``: remove the library's tables and its keys in Redis."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

import click
from peewee import PeeweeException

from housekeeping.cli.main import load_settings
from housekeeping.cli.output import confirm, json_option, print_as_json, progress, say, wants_json
from housekeeping.core.errors import Refused, WrongArgument
from housekeeping.core.logs import counted, error_line
from housekeeping.core.redis import redis_client, text, translate_redis_errors
from housekeeping.core.settings import MAIN, Settings
from housekeeping.core.urls import AMQP
from housekeeping.database.connection import database, translate_postgres_errors
from housekeeping.database.errors import sqlstate
from housekeeping.ledger import schema
from housekeeping.ledger.processes import (
    SILENCE,
    HeartbeatStore,
    PostgresHeartbeats,
    RedisHeartbeats,
    read_processes,
)
from housekeeping.ledger.schema import MODELS, NOW, DetachedPartition, OutboxRow, Run, run_label

if TYPE_CHECKING:
    import redis

#: Keys per Redis command.
_KEYS: Final = 1000
#: The archives of a database, recognized by their column.
_ARCHIVES: Final = """
SELECT attrelid::regclass::text FROM pg_attribute JOIN pg_class ON pg_class.oid = attrelid
WHERE attname = 'archived_by_run' AND NOT attisdropped AND relkind IN ('r', 'p') AND NOT relispartition ORDER BY 1
"""
#: SQLSTATE dependent_objects_still_exist.
_NEEDED: Final = "2BP01"


@click.command()
@click.option("--dry-run", is_flag=True, help="Show what would be removed, and remove nothing.")
@click.option("--yes", is_flag=True, help="Do not ask for a confirmation.")
@json_option("Print JSON: what was removed, and what was not.")
def uninstall(dry_run: bool, yes: bool) -> None:
    """Remove the library's tables and its keys in Redis, for good.

    Shows what is removed and what is not, then asks for a confirmation. Removes the history of runs, receipts of
    erasures, overrides, leases, and messages in the queues of the namespace. Keeps archives, detached partitions, the
    tables of "init --with-tables", the hash "pending_direct_uploads", and queues in RabbitMQ or in an application's
    broker.

    Stop all workers and schedulers first. Without --dry-run, the command fails while one of them is alive, while a run
    is in progress, or if Redis does not answer. It also fails if the schema contains one of your own tables or views,
    or if one depends on it. Can be repeated safely.
    """
    settings = load_settings()
    schema.use_database(settings)
    # The queues may be on another Redis server.
    urls = dict.fromkeys([settings.redis_url, settings.broker_url])
    clients = [redis_client(url) for url in urls if url and not url.startswith(AMQP)]
    if wants_json() and not (yes or dry_run):
        raise WrongArgument("--json does not ask for a confirmation; add --yes, or --dry-run")
    with progress("reading"):
        if not dry_run:
            _refuse_while_alive(settings)
        parts = [_read(name) for name in database.by_name()]
        counts = [_count(each, settings.namespace) for each in clients]
    keys, messages = sum(each for each, _ in counts), sum(each for _, each in counts)
    left = [
        *(line for _, _, lines in parts for line in lines),
        *(["pending_direct_uploads in Redis, which belongs to the application"] if settings.redis_url else []),
        "tables of init --with-tables, database roles and their rights",
        *(["queues in RabbitMQ and their messages"] if settings.on_rabbitmq else []),
        "messages in the broker of an application that calls housekeeping.install",
    ]
    result = {
        "removed": not dry_run,
        "databases": [found for found, _, _ in parts],
        "redis_keys": keys if clients else None,
        "messages": messages if clients else None,
        "left": left,
    }
    if not wants_json():
        for found, content, _ in parts:
            say(f"database {found['database']}, schema {found['schema']}: {content}")
        if clients:
            say(f"Redis keys {settings.namespace}:*: {counted(keys, 'key')}, {counted(messages, 'message')} in queues")
        for line in left:
            say(f"stays: {line}")
    if not dry_run:
        if not yes:
            confirm("This cannot be undone. Remove these tables and keys?", "nothing was removed")
        for name in database.by_name():
            _drop(name)
        for client in clients:
            for some in _keys(client, settings.namespace):
                with translate_redis_errors():
                    client.unlink(*some)
    if not print_as_json(result) and not dry_run:
        say("removed; to remove the package: pip uninstall dramatiq-housekeeping")


def _refuse_while_alive(settings: Settings) -> None:
    with database.using(MAIN), translate_postgres_errors():
        # The heartbeats of `housekeeping serve` are in the ledger.
        stores: list[HeartbeatStore] = [PostgresHeartbeats()] if schema.missing_statements()[0] else []
    if settings.redis_url is not None:
        stores.append(RedisHeartbeats(redis_client(settings.redis_url), settings.namespace))
    alive = []
    for store in stores:
        processes = read_processes(store, datetime.now(UTC))
        if not processes.known:
            why = processes.rejected or f"{store.server} did not answer"
            raise Refused(f"{why}, so running workers are unknown; nothing was removed")
        alive += [f"{each.heartbeat.kind} {each.name}" for each in processes.every if each.alive]
    for name in database.by_name():
        with database.using(name), translate_postgres_errors():
            if schema.missing_statements()[0] == 0:
                continue
            at_work = Run.select(Run.id, Run.worker).where(Run.outcome.is_null(), Run.heartbeat_at > NOW - SILENCE)
            alive += [f"run {run_label(run.id, name)} of {run.worker}" for run in at_work.limit(10)]
    if alive:
        raise Refused(
            f"still at work: {', '.join(alive[:10])}; stop all workers and schedulers. "
            f"A killed process counts as alive for {SILENCE.total_seconds():.0f} s. Nothing was removed"
        )


def _read(name: str) -> tuple[dict[str, Any], str, list[str]]:
    """Return the schema of a database for --json, what it contains, and the objects that are not removed."""
    with database.using(name), translate_postgres_errors():
        left = [f"archive {table}" for (table,) in database.execute_sql(_ARCHIVES).fetchall()]
        exists = schema.missing_statements()[0] > 0
        if exists:
            detached = DetachedPartition.select(DetachedPartition.name, DetachedPartition.worker)
            left += [f"{each.name}, a partition that {each.worker} has detached" for each in detached]
        place = f" (database {name})" if database.several() else ""
        runs, rows = (Run.select().count(), OutboxRow.select().count()) if exists else (0, 0)
        run: Any = Run
        content = f"{counted(runs, 'run')}, {counted(rows, 'undelivered row')}" if exists else "does not exist"
        found = {"database": name, "schema": run._meta.schema, "runs": runs}
        return found, content, [f"{each}{place}" for each in left]


def _keys(client: redis.Redis, namespace: str) -> Iterator[list[str]]:
    """Yield the keys of the namespace, up to a thousand at a time."""
    # The namespace needs no escaping: it has no special characters of patterns.
    with translate_redis_errors():
        keys = sorted({text(each) for each in client.scan_iter(match=f"{namespace}:*", count=_KEYS)})
    yield from (keys[start : start + _KEYS] for start in range(0, len(keys), _KEYS))


def _count(client: redis.Redis, namespace: str) -> tuple[int, int]:
    """Return the number of keys, and of messages including dead letters."""
    keys = messages = 0
    for some in _keys(client, namespace):
        keys += len(some)
        with translate_redis_errors(), client.pipeline(transaction=False) as pipeline:
            for key in some:
                if key.startswith(f"{namespace}:broker:") and key.endswith(".msgs"):
                    pipeline.hlen(key)
            messages += sum(pipeline.execute())
    return keys, messages


def _drop(name: str) -> None:
    """Drop the library's tables and schema in one transaction; raise Refused if other objects depend on them."""
    models: tuple[Any, ...] = MODELS
    schema_name = models[0]._meta.schema
    tables = ", ".join(
        f'"{schema_name}".{each}' for each in ("migrations", *(each._meta.table_name for each in models))
    )
    try:
        with database.using(name), translate_postgres_errors(), database.atomic():
            database.execute_sql(f"DROP TABLE IF EXISTS {tables}")
            database.execute_sql(f'DROP SCHEMA IF EXISTS "{schema_name}"')
    except PeeweeException as error:
        if sqlstate(error) != _NEEDED:
            raise
        detail = getattr(getattr(getattr(error, "orig", None), "diag", None), "message_detail", None) or ""
        raise Refused(f"{error_line(error)}: {' '.join(detail.split())}; drop or move it first") from error
