"""Trial with its own schemas, keys and folders on the suite's servers, and real processes."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import ExitStack, closing
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self
from uuid import uuid4

import psutil
import psycopg2
import redis

from tests.acceptance.processes import SCHEDULER, WORKER, Process, eventually, started
from tests.chaos.families import Family, Place, State
from tests.chaos.points import FOLDER, GO
from tests.chaos.proxy import Proxy
from tests.chaos.recorder import Recorder
from tests.chaos.sending import Sender
from tests.chaos.shortened import SHORTENED
from tests.internals.database import connect_to, database
from tests.internals.embedded import Servers
from tests.internals.ledger import schema
from tests.internals.workers import BUILT_IN

APP: Final = "tests.chaos.app"
PATIENCE_S: Final = 120.0
LEASE_TTL_S: Final = 3
_BETWEEN_TICKS_S: Final = 1.0
_TOP: Final = Path(__file__).parents[2]
_SHIFTED_CLOCK: Final = _TOP / "tests" / "acceptance" / "shifted_clock"
#: A tick beside the schedule, unless one waits already.
_TICK: Final = """
INSERT INTO {own}.ticks (worker, tick, message_id, due_at)
SELECT %s, clock_timestamp(), gen_random_uuid()::text, clock_timestamp()
WHERE NOT EXISTS (SELECT FROM {own}.ticks WHERE worker = %s AND due_at IS NOT NULL AND attempts = 0)
RETURNING worker
"""
#: Time between the end of a run and of its lease. The next message finishes what a busy machine does not.
_MARGIN_S: Final = 0.5


class Trial:
    """Workers with test data and processes.

    Attributes:
      place: Where their records are.
      postgres, redis: The proxies that the processes, and nobody else, go through.
      recorder: What was committed.
      servers: The suite's, for those who do them harm.
      own_schema: The library's.
    """

    def __init__(
        self,
        servers: Servers,
        folder: Path,
        families: Sequence[Family],
        *,
        shortened: bool = True,
        lease_ttl_s: float = LEASE_TTL_S,
        app: str = APP,
        settings: dict[str, str] | None = None,
    ) -> None:
        self.families = families
        self.servers = servers
        self._folder = folder
        self._name = f"chaos_{uuid4().hex[:8]}"
        self._shortened = shortened
        self._lease_ttl_s = lease_ttl_s
        self._app = app
        self._settings = settings or {}
        self._each: dict[str, Any] = {}  # settings of each worker
        self._started = 0
        self._ends = ExitStack()
        self.own_schema = f"{self._name}_own"
        self.rounds: dict[int, Sequence[Family]] = {}

    def __enter__(self) -> Self:
        with ExitStack() as ends:
            for part in ("objects", "repositories/@hashed", "points"):
                (self._folder / part).mkdir(parents=True)
            sockets = self.servers.folder / "s" / ".s.PGSQL.5432", self.servers.folder / "r" / "redis.sock"
            self.postgres, self.redis = (ends.enter_context(Proxy(socket)) for socket in sockets)
            client = ends.enter_context(redis.Redis.from_url(self.servers.redis_url))
            self._make_tables()
            self.place = Place(ends.enter_context(closing(self._connection())), client, self._folder)
            self.recorder = Recorder(self.place, self._name, self.own_schema, self.families)
            self._processes = ends.enter_context(ExitStack())
            self._ends = ends.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._ends.close()

    @cached_property
    def sender(self) -> Sender:
        """The process that sends messages."""
        return self._processes.enter_context(Sender(self._app, self.environment))

    @property
    def environment(self) -> dict[str, str]:
        """Return the environment of the trial's processes."""
        workers: dict[str, dict[str, Any]] = {
            sweep.name: {"enabled": any(sweep.name == family.actor for family in self.families)}
            for module in BUILT_IN
            for sweep in module.SWEEPS
        }
        short = {"max_runtime_s": self._lease_ttl_s - _MARGIN_S} if self._shortened else {}
        for family in self.families:
            if not family.is_worker:
                continue
            lease = {"lease_ttl_s": self._lease_ttl_s} if family.leased and self._shortened else {}
            workers.setdefault(family.actor, {}).update({**family.settings, **short, **lease, **self._each})
        ours = {
            "DATABASE_URL": f"postgresql://postgres@127.0.0.1:{self.postgres.port}/postgres"
            f"?options=-csearch_path%3D{self._name}",
            "REDIS_URL": f"redis://127.0.0.1:{self.redis.port}",
            "NAMESPACE": self._name,
            "SCHEMA": self.own_schema,
            "LOG_FORMAT": "json",
            "GRACE_S": "3",
            "OBJECT_STORES": json.dumps({"artifacts": f"file://{self._folder / 'objects'}"}),
            "REPOSITORIES_ROOT": str(self._folder / "repositories"),
            "WORKERS": json.dumps(workers),
            **self._settings,
        }
        kept = {name: value for name, value in os.environ.items() if not name.startswith("HOUSEKEEPING_")}
        path = os.pathsep.join(filter(None, [kept.get("PYTHONPATH", ""), str(_TOP)]))
        kept |= {"PYTHONPATH": path, FOLDER: str(self._folder / "points")}
        if self._shortened:
            kept[SHORTENED] = "1"
        return kept | {f"HOUSEKEEPING_{name}": value for name, value in ours.items()}

    def worker(self, app: str | None = None) -> Process:
        """Start a dramatiq process with a thread per family and spare ones. It ends with the trial."""
        return self._process([*WORKER, app or self._app, "-p", "1", "-t", "8", "--skip-logging"])

    def command(self, *arguments: str) -> Process:
        """Start a command of an operator. It ends with the trial."""
        return self._process([sys.executable, "-m", "tests.chaos.command", *arguments])

    @staticmethod
    def kill(process: Process) -> None:
        """Kill the program and its worker processes, but no git process that they started.

        A git that is killed leaves its locks behind, and only a person can tell that they are nobody's.
        """
        python = [psutil.Process(process.running.pid), *psutil.Process(process.running.pid).children()]
        for each in python:
            each.kill()
        process.running.wait(PATIENCE_S)

    def scheduler(self) -> Process:
        """Start a periodiq process. It ends with the trial."""
        return self._process([*SCHEDULER, self._app])

    def fill(self, round: int, families: Sequence[Family] | None = None) -> None:
        """Create a round of records for all or some families, and remember it."""
        self.rounds[round] = self.families if families is None else families
        for family in self.rounds[round]:
            family.fill(self.place, round)

    def add_round(self, round: int) -> None:
        """Create a round of records and send its messages."""
        self.fill(round)
        self.tick([round])

    def tick(self, rounds: Iterable[int] | None = None) -> list[str]:
        """Send the messages of these rounds like a schedule. Return the errors of those not sent."""
        chosen = list(self.rounds) if rounds is None else rounds
        families = [(family, round) for round in chosen for family in self.rounds[round] if family.is_worker]
        calls = dict.fromkeys((family.actor, family.arguments(round)) for family, round in families)
        answers = [self.sender.send(actor, *arguments) for actor, arguments in calls]
        return [answer["error"] for answer in answers if "error" in answer]

    def left(self, round: int) -> dict[str, State]:
        """Return the current records of a round by actor."""
        return {family.actor: family.left(self.place, round) for family in self.rounds[round]}

    def arm(self, point: str, time: int, families: Sequence[Family] | None = None) -> None:
        """Hold all or some families at this pass of a point."""
        for name in (GO, *(path.name for path in self._points.iterdir())):
            (self._points / name).unlink(missing_ok=True)
        for family in families or self.families:
            prepared = self._points / f"{family.actor}.{point}"
            prepared.write_text(str(time))
            prepared.rename(f"{prepared}.armed")

    def hold_first_round(self, point: str, time: int, *processes: Process) -> None:
        """Hold all families at this pass of a point in the first round."""
        self.arm(point, time)
        self.add_round(1)
        self.await_held(*processes)

    def await_held(self, *processes: Process, ticking: bool = False) -> None:
        """Wait until every armed point is reached.

        Parameters:
          ticking: Whether messages are sent meanwhile. On a busy machine a run may end by its time limit before.
        """
        next_tick = time.monotonic() + _BETWEEN_TICKS_S

        def all_held() -> bool:
            nonlocal next_tick
            held = not list(self._points.glob("*.armed"))
            if ticking and not held and time.monotonic() > next_tick:
                self.tick()  # messages of workers that are held already are dropped as duplicates
                next_tick = time.monotonic() + _BETWEEN_TICKS_S
            return held

        eventually(all_held, *processes, patience_s=PATIENCE_S)

    def go(self) -> None:
        """Release the held threads."""
        (self._points / GO).touch()

    @property
    def waiting(self) -> int:
        """Return the number of queued, running, delayed and dead messages."""
        client: Any = self.place.redis_client
        own = f"{self._name}:broker:"
        bodies = sum(client.hlen(key) for key in client.scan_iter(match=f"{own}*.msgs", count=1000))
        return int(bodies)

    def whereabouts(self) -> list[str]:
        """Return queue and history of each waiting message."""
        client: Any = self.place.redis_client
        own = f"{self._name}:broker:"
        told = []
        for key in client.scan_iter(match=f"{own}*.msgs", count=1000):
            for body in client.hvals(key):
                message = json.loads(body)
                options = {name: message["options"].get(name) for name in ("retries", "eta", "redis_message_id")}
                traceback = (message["options"].get("traceback") or "").strip().splitlines()[-1:]
                queue = key.decode().removeprefix(own)
                told.append(f"{queue}: {message['actor_name']}{message['args']} {options} {traceback}")
        for key in client.scan_iter(match=f"{own}__acks__*", count=1000):
            told.append(f"{key.decode().removeprefix(own)}: {client.scard(key)} in hand")
        return told

    def keys(self, pattern: str) -> list[str]:
        """Return matching keys in Redis without the namespace."""
        found = self.place.redis_client.scan_iter(match=f"{self._name}:{pattern}", count=1000)
        return sorted(key.decode().removeprefix(f"{self._name}:") for key in found)

    def backends(self) -> list[int]:
        """Return the PostgreSQL backends of the workers."""
        query = "SELECT pid FROM pg_stat_activity WHERE application_name = 'housekeeping' AND pid <> pg_backend_pid()"
        return [pid for (pid,) in self.place.rows(query)]

    def reconnect(self) -> None:
        """Reconnect after an outage of the server."""
        self.place.connection.close()
        self.place.connection = self._ends.enter_context(closing(self._connection()))

    @property
    def _points(self) -> Path:
        return self._folder / "points"

    def _process(self, command: list[str], environment: dict[str, str] | None = None) -> Process:
        self._started += 1
        log = self._folder / f"process-{self._started}.log"
        return self._processes.enter_context(started(command, environment or self.environment, log))

    def _connection(self) -> Any:
        connection = psycopg2.connect(self.servers.database_url, options=f"-csearch_path={self._name}")
        connection.autocommit = True
        return connection

    def _make_tables(self) -> None:
        with closing(self._connection()) as connection, connection.cursor() as cursor:
            cursor.execute(f"CREATE SCHEMA {self._name}")
        separator = "&" if "?" in self.servers.database_url else "?"
        url = f"{self.servers.database_url}{separator}options=-csearch_path%3D{self._name}"
        database.initialize(connect_to(url))
        schema.use_schema(self.own_schema)
        try:
            schema.init()
            database.create_tables([model for family in self.families for model in family.models])
            for statements in filter(None, (family.setup for family in self.families)):
                database.execute_sql(statements)
            database.close()
        finally:
            database.initialize(None)
            schema.use_schema("housekeeping")


class ServeTrial(Trial):
    """Trial without Redis: its processes are ``housekeeping serve``, and its messages are ticks.

    Parameters:
      schedule: Of each worker; by default no tick is due but those of the trial.
    """

    def __init__(self, *args: Any, schedule: str = "0 0 1 1 *", **more: Any) -> None:
        super().__init__(*args, settings={"REDIS_URL": ""}, **more)
        self._each = {"schedule": schedule}

    def worker(self, app: str | None = None, *, ahead_s: int = 0) -> Process:
        """Start a process, with a clock that is so many seconds ahead. It ends with the trial."""
        path = os.pathsep.join((str(_SHIFTED_CLOCK), self.environment["PYTHONPATH"]))
        shifted = {"PYTHONPATH": path, "TEST_CLOCK_AHEAD_S": str(ahead_s)} if ahead_s else {}
        serve = [sys.executable, "-m", "tests.chaos.command", "serve", "--threads", "8"]
        return self._process(serve, self.environment | shifted)

    def tick(self, rounds: Iterable[int] | None = None) -> list[str]:
        chosen = list(self.rounds) if rounds is None else rounds
        for actor in {family.actor for round in chosen for family in self.rounds[round]}:
            self.place.rows(_TICK.format(own=self.own_schema), actor, actor)
        return []

    @property
    def waiting(self) -> int:
        [[number]] = self.place.rows(f"SELECT count(*) FROM {self.own_schema}.ticks WHERE due_at IS NOT NULL")
        return int(number)

    def whereabouts(self) -> list[str]:
        return [str(row) for row in self.place.rows(f"SELECT * FROM {self.own_schema}.ticks WHERE due_at IS NOT NULL")]
