"""A small shop at night, and an operator who types commands or follows links."""

from __future__ import annotations

import html
import json
import os
import re
import shlex
import socket
import sys
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from http.cookiejar import CookieJar
from pathlib import Path
from typing import Any, Final
from uuid import uuid4

import psycopg2
import redis
from dramatiq import Message

from housekeeping import Settings
from tests.acceptance.processes import Process, eventually, started
from tests.acceptance.test_dashboard import TOKEN
from tests.command_processes import CommandProcesses
from tests.internals.brokers import message_broker
from tests.internals.embedded import embedded
from tests.internals.ledger import RedisHeartbeats

HOUSEKEEPING: Final = [sys.executable, "-m", "housekeeping"]
ORDERS: Final = "shop.orders"
#: Its rows are called for at a service that may not answer.
CALLS: Final = "shop.calls"
#: It runs at night, and is paused.
EMAILS: Final = "shop.emails"
QUICK: Final = Path(__file__).parents[1] / "quick_heartbeats"
_SHOP: Final = """
import os, socket
from datetime import timedelta
from peewee import TextField
from housekeeping import BaseModel, Call, Delete, Lease, Limits, Rows, Sweep, UtcDateTimeField


class Order(BaseModel):
    expires_at = UtcDateTimeField()
    grace = TextField()

    class Meta:
        table_name = "orders"


class Parcel(BaseModel):
    expires_at = UtcDateTimeField()

    class Meta:
        table_name = "parcels"


class Email(BaseModel):
    expires_at = UtcDateTimeField()

    class Meta:
        table_name = "emails"


def tell_the_service(row):
    if os.environ["SERVICE_PORT"] == "0":
        raise ValueError("the carrier has lost it")
    with socket.create_connection(("127.0.0.1", int(os.environ["SERVICE_PORT"]))) as service:
        service.recv(1)


orders = Sweep(
    "shop.orders",
    Rows(
        Order,
        stale=lambda row, now: (row.expires_at <= now) & (row.grace.cast("integer") == 0),
        order="expires_at",
        action=Delete(archive_to="old_orders"),
    ),
    schedule="* * * * *",
)
calls = Sweep(
    "shop.calls",
    Rows(
        Parcel,
        stale=lambda row, now: row.expires_at <= now,
        order="expires_at",
        action=Call(tell_the_service, then=Delete()),
    ),
    limits=Limits(runtime=timedelta(seconds=1)),
    lease=Lease("shop.calls", ttl=timedelta(minutes=10)),
)
emails = Sweep(
    "shop.emails",
    Rows(Email, stale=lambda row, now: row.expires_at <= now, order="expires_at", action=Delete()),
    schedule="0 2 * * *",
)
"""


class Browser:
    """Operator with a browser without JavaScript, logged in, who follows only the links of the pages."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._opener = urllib.request.build_opener(urllib.request.HTTPCookieProcessor(CookieJar()))
        page = self.get("/login")
        found = re.search(r'name="form_token" value="([^"]+)"', page)
        assert found is not None
        self._send("/login", urllib.parse.urlencode({"token": TOKEN, "form_token": found[1]}).encode())

    def get(self, path: str) -> str:
        return self._send(path, None)

    def _send(self, path: str, form: bytes | None) -> str:
        try:
            with self._opener.open(f"{self._address}{path}", form, timeout=90) as answer:
                return str(answer.read().decode())
        except urllib.error.HTTPError as error:
            return error.read().decode()


def links_of(page: str) -> set[str]:
    """Return the links of a page, and its forms that change nothing."""
    found = re.findall(r'(?:href|action)="(/[^"#]*)', page)
    return {html.unescape(each) for each in found}


def text_of(page: str) -> str:
    """Return the visible text of a page."""
    body = re.sub(r"(?s)<(script|style|title)\b.*?</\1>|<wbr>|<wbr/>", "", page)
    return " ".join(html.unescape(re.sub(r"<[^>]+>", " ", body)).split())


@dataclass
class Night:
    """An installation in one state.

    Attributes:
      ledger: The schema of the library's tables.
      values: What questions and answers call `{run}` and the like.
      printed: What commands have printed: several answers are read from one output.
    """

    folder: Path
    environment: dict[str, str]
    commands: CommandProcesses
    stack: ExitStack
    servers: Any
    settings: Settings
    ledger: str
    values: dict[str, str] = field(default_factory=dict)
    printed: dict[str, str] = field(default_factory=dict)
    browser: Browser | None = None
    admin: Any = None

    def type(self, line: str) -> str:
        """Run ``housekeeping`` with these arguments. Return its output."""
        finished = self.commands.run(shlex.split(line), self.environment, self.folder, timeout_s=90)
        return f"{finished.stdout}\n{finished.stderr}"

    def json(self, line: str) -> Any:
        finished = self.commands.run([*shlex.split(line), "--json"], self.environment, self.folder, timeout_s=90)
        assert finished.returncode == 0, finished.stderr
        return json.loads(finished.stdout)

    def look(self, path: str) -> str:
        assert self.browser is not None
        return self.browser.get(path)

    def sql(self, *statements: str) -> None:
        with self.admin.cursor() as cursor:
            for statement in statements:
                cursor.execute(statement)

    def value(self, query: str) -> Any:
        """Return the first column of the query's first row."""
        with self.admin.cursor() as cursor:
            cursor.execute(query)
            return cursor.fetchone()[0]

    def connect(self) -> None:
        """Connect like the application; connect again after a restart."""
        self.admin = psycopg2.connect(self.servers.database_url, options=f"-csearch_path={self.settings.namespace}")
        self.admin.autocommit = True
        self.stack.callback(self.admin.close)

    def slow_down_orders(self) -> None:
        """Let each deletion of an order take ten milliseconds."""
        self.sql(
            "CREATE FUNCTION be_slow() RETURNS trigger LANGUAGE plpgsql AS "
            "$$ BEGIN PERFORM pg_sleep(0.01); RETURN OLD; END $$",
            "CREATE TRIGGER slow BEFORE DELETE ON orders FOR EACH ROW EXECUTE FUNCTION be_slow()",
        )

    def start(self, *words: str) -> Process:
        log = self.folder / f"{uuid4().hex[:6]}.log"
        in_folder = ["sh", "-c", 'cd "$0" && exec "$@"', str(self.folder)]
        return self.stack.enter_context(started([*in_folder, *HOUSEKEEPING, *words], self.environment, log))

    def start_idle(self, threads: int = 1) -> tuple[Process, Process]:
        """Start a worker and a scheduler, and return them when both are idle."""
        worker, scheduler = self.start("worker", "-t", str(threads)), self.start("scheduler")
        with redis.Redis.from_url(self.servers.redis_url) as client:
            heartbeats = RedisHeartbeats(client, self.settings.namespace)
            eventually(lambda: len(heartbeats.read()) == 2, worker, scheduler)
        self.status_says("worker idle", worker)
        self.status_says("scheduler idle", scheduler)
        return worker, scheduler

    def add_orders(self, rows: int) -> None:
        """Add stale orders, the oldest of which is as many hours old."""
        self.sql(
            f"INSERT INTO orders (expires_at) SELECT now() - n * interval '1 hour' FROM generate_series(1, {rows}) AS n"
        )

    def put(self, actor: str, times: int = 1, **options: int) -> None:
        broker = message_broker(self.settings)
        broker.declare_queue("cronjob")
        for _ in range(times):
            broker.enqueue(Message("cronjob", actor, (), {}, dict(options)))
        broker.close()

    def status_says(self, text: str, *processes: Process) -> None:
        eventually(lambda: text in " ".join(self.type("status").split()), *processes)


_LAST_02: Final = "(date_trunc('day', now() - interval '2 hours', 'UTC') + interval '2 hours')"


@contextmanager
def night(servers: embedded.Servers, commands: CommandProcesses, folder: Path) -> Iterator[Night]:
    """Yield an installation with a short history.

    A run has archived, another one has rejected a row, and a worker with a backlog is paused since before its tick.
    """
    name = f"night_{uuid4().hex[:8]}"
    (folder / "night_shop.py").write_text(_SHOP)
    loaded = Settings(
        database_url=f"{servers.database_url}&options=-csearch_path%3D{name}%20-clock_timeout%3D1s",
        redis_url=servers.redis_url,
        namespace=name,
        schema_name=f"{name}_own",
    )
    environment = {
        **{key: value for key, value in os.environ.items() if key not in ("COLUMNS", "LINES")},
        "HOUSEKEEPING_DATABASE_URL": str(loaded.database_url),
        "HOUSEKEEPING_REDIS_URL": servers.redis_url,
        "HOUSEKEEPING_NAMESPACE": name,
        "HOUSEKEEPING_SCHEMA": f"{name}_own",
        "HOUSEKEEPING_SWEEPS": "night_shop",
        "HOUSEKEEPING_BUILT_IN": "",
        "COLUMNS": "400",
    }
    with ExitStack() as stack:
        quiet = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        environment["SERVICE_PORT"] = str(quiet.getsockname()[1])
        made = Night(folder, environment, commands, stack, servers, loaded, f"{name}_own")
        made.connect()
        made.sql(
            f"CREATE SCHEMA {name}",
            "CREATE TABLE orders (id serial PRIMARY KEY, expires_at timestamptz NOT NULL, grace text DEFAULT '0')",
            "CREATE TABLE parcels (id serial PRIMARY KEY, expires_at timestamptz NOT NULL)",
            "CREATE TABLE emails (id serial PRIMARY KEY, expires_at timestamptz NOT NULL)",
            "CREATE INDEX ON orders (expires_at, id)",
            "INSERT INTO parcels (expires_at) VALUES (now() - interval '1 hour')",
            "INSERT INTO emails (expires_at) SELECT now() - n * interval '1 hour' FROM generate_series(1, 40) AS n",
        )
        made.add_orders(700)
        made.type("init --with-archives")
        _add_history(made, f"{name}_own.runs")
        commands.run(["run", CALLS, "--confirm"], {**environment, "SERVICE_PORT": "0"}, folder, timeout_s=90)
        made.values["run"] = str(made.json(f"run {ORDERS} --confirm")["run_id"])
        made.type(f"pause {EMAILS} --reason 'mail server moves'")
        made.sql(f"UPDATE {name}_own.switches SET since = {_LAST_02} - interval '1 hour'")
        made.values["rejected_run"] = str(made.json(f"runs {CALLS}")["runs"][0]["run_id"])
        made.values["tick_run"] = str(made.json(f"runs {EMAILS}")["runs"][0]["run_id"])
        yield made


def _add_history(made: Night, runs: str) -> None:
    ended = "trigger, started_at, heartbeat_at, finished_at, outcome"
    made.sql(
        f"INSERT INTO {runs} (worker, {ended}, counts, backlog, backlog_exact) "
        f"SELECT '{ORDERS}', 'schedule', at, at, at, 'done', '{{\"deleted_rows\": 100}}', 250 + 10 * n, true "
        "FROM generate_series(0, 4) AS n, LATERAL (SELECT now() - (5 - n) * interval '1 hour') AS run (at)",
        f"INSERT INTO {runs} (worker, {ended}, counts) "
        f"SELECT '{EMAILS}', 'schedule', at, at, at + interval '2 seconds', 'done', '{{\"deleted_rows\": 100}}' "
        "FROM (SELECT now() - interval '2 days') AS run (at)",
        f"INSERT INTO {runs} (worker, tick, {ended}, reason) "
        f"SELECT '{EMAILS}', at, 'schedule', at, at, at, 'skipped', 'paused' FROM (SELECT {_LAST_02}) AS tick (at)",
    )
