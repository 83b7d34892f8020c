"""Pages own-sweep*.md and those of holds, pace, archives and partitions in docs/howto, followed step by step."""

from __future__ import annotations

import json
import runpy
import shutil
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Final

import pytest
import redis
from psycopg2.extensions import connection as Connection
from psycopg2.extensions import parse_dsn

from docs.generators.example_blocks import path_of
from housekeeping import Settings
from housekeeping.testing.assertions import assert_survives_kill
from tests.acceptance import pages
from tests.acceptance.pages import with_programs
from tests.command_processes import CommandProcesses
from tests.declarations import changed
from tests.installation import Installation
from tests.internals.database import Database
from tests.unit.docs.blocks import ROOT, Block, blocks

pytestmark = pytest.mark.slow

HOWTO: Final = ROOT / "docs/howto"
_WAREHOUSE: Final = "http://warehouse:8080"
_REFUSED: Final = "/cancellations/4"
_DJANGOS_NAMES: Final[dict[str, str]] = {
    "host": "HOST",
    "port": "PORT",
    "dbname": "NAME",
    "user": "USER",
    "password": "PASSWORD",
}
#: Placeholder of the Django page for a reader's own server.
_DJANGOS_DATABASE: Final = "".join(
    f'        "{name}": "{value}",\n'
    for name, value in {"HOST": "host", "NAME": "application", "USER": "user", "PASSWORD": "password"}.items()
)


class Warehouse:
    """External service that records method and path of each request."""

    def __init__(self) -> None:
        requests = self.requests = list[str]()

        class Handler(BaseHTTPRequestHandler):
            def do_PUT(self) -> None:
                requests.append(f"{self.command} {self.path}")
                self.send_response(422 if self.path == _REFUSED else 200)
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None:
                """Log nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever)
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> Warehouse:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


class Reader(pages.Reader):
    """Reader who writes a page's modules into a folder, and follows the rest."""

    def __init__(self, installation: Installation, folder: Path, warehouse: Warehouse) -> None:
        super().__init__(installation, folder)
        self._warehouse = warehouse

    def read(self, page: str, *, without: str = "") -> None:
        """Follow a page, without the part of this heading."""
        lines = (HOWTO / f"{page}.md").read_text(encoding="utf-8").splitlines()
        heading = ""
        headings = [heading := line if line.startswith("## ") else heading for line in lines]
        for block in blocks(HOWTO / f"{page}.md"):
            if headings[block.line - 1] == f"## {without}":
                continue
            if path_of(block.mark) is None:  # otherwise a file of docs/examples, at the path that the page gives
                self.do(block)

    def with_own_servers(self, text: str) -> str:
        text = text.replace(_DJANGOS_DATABASE, self._djangos_database())
        return super().with_own_servers(text).replace(_WAREHOUSE, self._warehouse.url)

    def _djangos_database(self) -> str:
        given = parse_dsn(self._installation.settings.require_database_url())
        named = {_DJANGOS_NAMES[name]: value for name, value in given.items() if name in _DJANGOS_NAMES}
        named["OPTIONS"] = {"options": given["options"]}
        return "".join(f"        {name!r}: {value!r},\n" for name, value in named.items())

    def query(self, block: Block) -> list[tuple[Any, ...]]:
        return self.rows(block.text)


@pytest.fixture
def warehouse() -> Iterator[Warehouse]:
    with Warehouse() as warehouse:
        yield warehouse


@pytest.fixture
def reader(
    settings: Settings,
    postgres: Database,
    admin: Connection,
    redis_client: redis.Redis,
    environment: dict[str, str],
    command_processes: CommandProcesses,
    tmp_path: Path,
    warehouse: Warehouse,
) -> Reader:
    installation = Installation(
        settings, admin, redis_client, tmp_path, with_programs(environment, command_processes.folder), command_processes
    )
    return Reader(installation, tmp_path / "reader", warehouse)


def test_page_of_expired_sessions_works_as_written(reader: Reader) -> None:
    reader.read("own-sweep")

    assert reader.rows("SELECT count(*) FROM user_session WHERE expires_at <= now()") == [(0,)]
    assert reader.rows("SELECT count(*) FROM user_session") == [(2,)]


def test_page_of_stuck_orders_works_as_written(reader: Reader, warehouse: Warehouse) -> None:
    reader.read("own-sweep-side-effect")

    assert sorted(warehouse.requests) == [f"PUT /cancellations/{id}" for id in (3, 4, 5)]
    found = reader.rows("SELECT id, status FROM orders ORDER BY id")
    assert found == [(1, "pending"), (2, "pending"), (3, "cancelled"), (4, "pending"), (5, "cancelled")]


def test_page_of_the_archive_works_as_written(reader: Reader) -> None:
    reader.read("own-sweep-archive")

    assert reader.rows("SELECT id FROM audit_log ORDER BY id") == [(1,), (2,), (3,)]
    assert archived(reader) == [4, 5, 6, 7, 8, 9, 10]


def test_page_of_archives_in_a_table_works_as_written(reader: Reader) -> None:
    reader.read("archive-and-restore")

    # The run after the restore has archived the stale sessions again.
    assert reader.rows("SELECT count(*) FROM user_session") == [(2,)]
    assert reader.rows("SELECT count(DISTINCT token), count(*) FROM old_sessions") == [(8, 8)]
    assert reader.rows("SELECT count(DISTINCT archived_by_run) FROM old_sessions") == [(1,)]


@pytest.mark.parametrize("other", ["With Django", "With SQLAlchemy"])
def test_page_of_a_delete_that_times_out_deletes_accounts_with_their_purchases(reader: Reader, other: str) -> None:
    reader.read("delete-times-out", without=other)

    assert reader.rows("SELECT id FROM account ORDER BY id") == [(each,) for each in (3, 6, 7, 8, 9, 10)]
    assert reader.rows("SELECT count(*), count(DISTINCT account_id) FROM purchase") == [(600, 6)]
    assert reader.rows("SELECT count(*), count(DISTINCT purchase_id) FROM purchase_item") == [(3000, 600)]
    assert reader.rows("SELECT count(*), count(author_id) FROM comment") == [(10, 6)]
    assert reader.rows("SELECT account_id FROM invoice") == [(3,)]


def test_page_of_partitions_drops_those_that_are_billed(reader: Reader, settings: Settings) -> None:
    reader.read("drop-partitions")

    assert reader.rows("SELECT id FROM page_view") == [(3,)]
    assert reader.rows("SELECT to_regclass('page_view_2023'), to_regclass('page_view_2024')") == [(None, None)]
    counts = "counts->'dropped_partitions', counts->'skipped_partitions'"
    assert reader.rows(f"SELECT {counts} FROM {settings.schema_name}.runs ORDER BY id") == [(1, 1), (1, 0)]


def test_page_for_sqlalchemy_deletes_expired_vouchers(reader: Reader) -> None:
    reader.read("own-sweep-sqlalchemy")

    assert reader.rows("SELECT count(*) FROM voucher WHERE expires_at <= now()") == [(0,)]
    assert reader.rows("SELECT count(*) FROM voucher") == [(4,)]


def test_page_of_examples_deletes_by_tenant_uuid_and_nullable_time(reader: Reader) -> None:
    shutil.copytree(ROOT / "docs/examples/own_sweeps", reader.folder / "own_sweeps")

    reader.read("own-sweep-examples")

    kept = (
        "SELECT tenant_id, round(extract(epoch FROM now() - created_at) / 86400)::int FROM tenant_event ORDER BY 1, 2"
    )
    assert reader.rows(kept) == [(1, 1), (2, 1), (2, 10), (3, 1), (3, 10), (3, 40)]
    assert reader.rows("SELECT count(*), min(expires_at) > now() FROM invitation") == [(2, True)]
    assert reader.rows("SELECT id FROM device ORDER BY id") == [(1,), (4,)]


def test_page_of_the_legal_hold_keeps_the_rows_on_hold(reader: Reader) -> None:
    reader.read("legal-hold")

    # The run was before the hold of user 5 was lifted, and before that of user 7 was set.
    assert reader.rows("SELECT user_id FROM user_document ORDER BY 1") == [(1,), (2,), (3,), (5,), (6,)]


def test_page_of_slow_runs_deletes_the_old_visits(reader: Reader) -> None:
    reader.read("slow-down")

    assert reader.rows("SELECT count(*) FROM visit") == [(3,)]


def test_archiving_process_killed_anywhere_loses_and_leaves_no_row(
    reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    for block in blocks(HOWTO / "own-sweep-archive.md")[:2]:
        reader.do(block)
    folder = reader.folder / "archive"
    monkeypatch.setenv("ARCHIVE", str(folder))
    module = runpy.run_path(str(reader.folder / "shop/archive.py"))
    sweep = changed(module["old_entries"], batch=4)

    points = assert_survives_kill(
        sweep, outside=lambda: archived(reader), restore=lambda: shutil.rmtree(folder, ignore_errors=True)
    )

    assert [point for point in points if point.startswith("os.rename")], "the files are among the points"


def archived(reader: Reader) -> list[int]:
    """Return the distinct entries in the archive, read as its page describes."""
    files = (reader.folder / "archive").glob("*.jsonl")
    return sorted({json.loads(line)["id"] for file in files for line in file.read_text().splitlines()})
