"""Fixtures: the table of pending deletions, repositories and the context of a run."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path, PurePath
from typing import Any

import pytest
import redis
from dramatiq.brokers.redis import RedisBroker
from psycopg2.extensions import connection as Connection

from housekeeping import Settings, events
from housekeeping.workers.batched_git_ref_updates.models import Deletion
from tests.integration.middleware.applications import close_all, installed
from tests.integration.statements import watch_statements
from tests.integration.workers.batched_git_ref_updates.repositories import MakeRepository, made
from tests.internals.database import Database
from tests.internals.engine import register, send
from tests.internals.workers import GIT_SWEEPS as SWEEPS
from tests.internals.workers import GitCli, backends

#: Adds rows whose ref is an SQL expression that may use n, from 1 on; returns nothing.
AddDeletions = Callable[..., None]
#: The refs of the rows that are still pending, in order of id.
Pending = Callable[[], list[str]]
#: Adds a row for each of these refs.
AddRefs = Callable[..., None]
#: The log records of an event.
Lines = Callable[[str], list[Any]]
#: Return the plans of the statements that a function sends.
Explained = Callable[[Callable[[], Any]], list[str]]


class Watched:
    """The real deletion with an action of the test before each batch; records the batches."""

    def __init__(self) -> None:
        self.batches: list[list[str]] = []
        self.before: Callable[[int, Sequence[str]], None] = lambda number, refs: None
        self._git = GitCli()

    def delete(self, repository: PurePath, refs: Sequence[str]) -> None:
        self.batches.append(list(refs))
        self.before(len(self.batches), refs)
        self._git.delete(repository, refs)


@pytest.fixture
def unbound(postgres: Database, redis_client: redis.Redis) -> Iterator[None]:
    """Restore the models after the test."""
    yield
    backends.use_root(None)
    Deletion._meta.schema = None
    Deletion._meta.set_table_name("batched_git_ref_updates_deletions")
    send.forget_all()


@pytest.fixture
def deletions(postgres: Database, unbound: None) -> type[Deletion]:
    """The empty table."""
    postgres.create_tables([Deletion])
    return Deletion


@pytest.fixture
def add_deletions(deletions: type[Deletion], admin: Connection) -> AddDeletions:
    def add(count: int, ref: str = "'refs/heads/' || n", *, project: str = "1", table: str | None = None) -> None:
        with admin.cursor() as cursor:
            cursor.execute(
                f"INSERT INTO {table or Deletion._meta.table_name} (project_id, ref, updated_at) "
                f"SELECT {project}, {ref}, timestamptz '2025-01-01 00:00:00+00' FROM generate_series(1, {count}) AS n"
            )

    return add


@pytest.fixture
def add_refs(deletions: type[Deletion]) -> AddRefs:
    """Add a row for each of these refs of project 1."""

    def add(*refs: str, project_id: int = 1) -> None:
        for ref in refs:
            Deletion.create(project_id=project_id, ref=ref)

    return add


@pytest.fixture
def pending(deletions: type[Deletion]) -> Pending:
    return lambda: [row.ref for row in Deletion.select().where(Deletion.status == 1).order_by(Deletion.id)]


@pytest.fixture
def pending_elsewhere(deletions: type[Deletion], admin: Connection) -> Pending:
    """The pending refs as another session sees them, while a run has its transaction open."""

    def read() -> list[str]:
        with admin.cursor() as cursor:
            cursor.execute(f"SELECT ref FROM {Deletion._meta.table_name} WHERE status = 1 ORDER BY id")
            return [ref for (ref,) in cursor.fetchall()]

    return read


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Path]:
    """The root folder of the repositories."""
    root = tmp_path / "repositories"
    (root / "@hashed").mkdir(parents=True)
    backends.use_root(root)
    yield root
    backends.use_root(None)
    backends.replace()


@pytest.fixture
def repository(root: Path) -> MakeRepository:
    """Create the repository of a project (default 1) with loose refs."""
    return lambda *refs, project_id=1: made(root, project_id, *refs)


@pytest.fixture
def watched(root: Path) -> Watched:
    watched = Watched()
    backends.replace(deletion=watched)
    return watched


@pytest.fixture
def told() -> Iterator[list[dict[str, Any]]]:
    """The rows that subscribers of `refs_deleted` receive."""
    seen: list[dict[str, Any]] = []

    def note(sender: str, **about: Any) -> None:
        seen.append(about)

    events.refs_deleted.connect(note)
    yield seen
    events.refs_deleted.disconnect(note)


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Lines:
    """The log records of an event, from info level on."""
    caplog.set_level(logging.INFO)
    return lambda event: [record for record in caplog.records if record.getMessage() == event]


@pytest.fixture
def broker(settings: Settings, deletions: type[Deletion], redis_client: redis.Redis) -> Iterator[RedisBroker]:
    """The application's broker with this family's actors."""
    broker = installed(settings.model_copy(update={"database_url": None}))
    for sweep in SWEEPS:
        register(broker, sweep)
    yield broker
    close_all()


@pytest.fixture
def explained(postgres: Database, monkeypatch: pytest.MonkeyPatch) -> Explained:
    """Return the plans of the statements that a function sends."""

    def explain(function: Callable[[], Any]) -> list[str]:
        sent: list[str] = []
        with monkeypatch.context() as noting:
            watch_statements(noting, lambda sql: sent.append(sql), with_values=True)
            with postgres.atomic() as undone:
                function()
                undone.rollback()
        return [
            "\n".join(row[0] for row in postgres.execute_sql(f"EXPLAIN ANALYZE {sql}"))
            for sql in sent
            if sql.startswith(("SELECT", "WITH", "UPDATE"))
        ]

    return explain
