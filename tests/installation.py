"""A small but whole installation: servers, an object store, repositories, and something to do for every worker."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final

import pytest
import redis
from psycopg2 import sql
from psycopg2.extensions import connection as Connection

from housekeeping import Settings
from tests.command_processes import CommandProcesses
from tests.internals.core import PREFIX, shared_redis
from tests.internals.database import Database
from tests.internals.demo import FAMILIES, scenes
from tests.internals.embedded import embedded
from tests.internals.ledger import Run
from tests.internals.workers import BUILT_IN, configured_sweeps

PROJECT: Final = "2"  # one with pending deletions, some of which are no names of refs
#: Worker -> the argument of a run, for every worker there is.
WORKERS: Final = {name: PROJECT if sweep.argument else None for name, sweep in configured_sweeps(Settings()).items()}
#: The demo's own numbers would take a second for each family.
_FEW: Final = (
    {"DUE": 7, "LATER": 0, "NEVER": 2}
    | {"IMPORTS": 9, "STUCK_IMPORTS": 4}
    | {"STALE": 6, "NEVER_CAME": 2, "GOING_ON": 3, "UNKNOWN_STORE": 1}
    | {"PROJECTS": 3, "LOOSE": 4, "PACKED": 3}
    | {"STUCK_BUILDS": 5, "AT_WORK": 4, "ENDED": 6, "DAMAGED": 1}
)


@dataclass(frozen=True)
class Installation:
    """Where everything is.

    Attributes:
      folder: Below it are the object store and the repositories.
      environment: What a process of it is started with.
    """

    settings: Settings
    admin: Connection
    client: redis.Redis
    folder: Path
    environment: dict[str, str]
    processes: CommandProcesses

    def command(self, *arguments: str, **settings: str) -> subprocess.CompletedProcess[str]:
        """``housekeeping`` with these arguments; settings by name come on top."""
        own = {f"{PREFIX}{name}": value for name, value in settings.items()}
        return self.processes.run(list(arguments), self.environment | own, self.folder, timeout_s=120)

    def everything(self) -> dict[str, object]:
        """All that is there, so that any change shows: rows and who last locked them, keys, files."""
        return {**self._rows(), **self._keys(), **self._files()}

    def _rows(self) -> dict[str, object]:
        schemas = [self.settings.namespace, self.settings.schema_name]
        with self.admin.cursor() as cursor:
            cursor.execute(
                "SELECT relnamespace::regnamespace::text, relname, relkind, relfilenode FROM pg_class "
                "WHERE relnamespace::regnamespace::text = ANY(%s) ORDER BY 1, 2",
                (schemas,),
            )
            relations = cursor.fetchall()
            found: dict[str, object] = {"relations": relations}
            for schema, name, kind, _ in relations:
                # xmax: a row that was only locked shows, too.
                columns = {"r": "xmin, xmax, ctid, *", "S": "*"}.get(kind)
                if columns is not None:
                    query = sql.SQL(f"SELECT {columns} FROM {{}}").format(sql.Identifier(schema, name))
                    cursor.execute(query)
                    found[f"{schema}.{name}"] = sorted(map(str, cursor.fetchall()))
        return found

    def _keys(self) -> dict[str, object]:
        client: Any = self.client
        keys = {key: (client.dump(key), client.pexpiretime(key)) for key in client.keys()}
        # Written and taken back is written, too.
        return {"keys": keys, "writes": client.info("persistence")["rdb_changes_since_last_save"]}

    def _files(self) -> dict[str, object]:
        return {
            path.relative_to(self.folder).as_posix(): (
                path.stat().st_mtime_ns,
                path.stat().st_ino,
                hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "",
            )
            for path in self.folder.rglob("*")
        }


@pytest.fixture(scope="session")
def redis_of_installations() -> Iterator[str]:
    """A server of their own: a real process uses the hash of uploads by its real name."""
    with embedded.start(postgres=False) as servers:
        yield servers.redis_url


@pytest.fixture
def installation(
    redis_of_installations: str,
    postgres: Database,
    settings: Settings,
    admin: Connection,
    environment: dict[str, str],
    command_processes: CommandProcesses,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Installation]:
    """An installation with stale rows for every worker, without a process."""
    folder = tmp_path / "installation"
    folder.mkdir()
    client = redis.Redis.from_url(redis_of_installations)
    # No other test uses this server.
    client.flushall()
    own = {name: value for scene in FAMILIES for name, value in scene.settings(folder).items()}
    ours = {"REDIS_URL": redis_of_installations, "BROKER_URL": "", **own}
    with monkeypatch.context() as patch:
        patch.setattr(shared_redis, "client", client)
        for name, number in _FEW.items():
            patch.setattr(scenes, name, number)
        configured_sweeps(settings)
        for family in BUILT_IN:
            postgres.create_tables(list(family.MODELS.values()))
        for scene in FAMILIES:
            scene.seed(folder)
    old = datetime.now(UTC) - timedelta(days=40)
    Run.insert(
        worker="a.former_worker", trigger="cli", started_at=old, heartbeat_at=old, finished_at=old, outcome="done"
    ).execute()
    kept = {name: value for name, value in environment.items() if not name.startswith(f"{PREFIX}TEST_")}
    programs = (command_processes.folder, Path(sys.executable).parent)
    path = os.pathsep.join((*map(str, programs), kept.get("PATH", os.defpath)))
    own = {f"{PREFIX}{name}": value for name, value in ours.items()}
    yield Installation(settings, admin, client, folder, kept | own | {"PATH": path}, command_processes)
    client.close()
