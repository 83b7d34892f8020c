"""Processes of the simulated application: workers, schedulers and a sender."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

import dramatiq.worker
import periodiq
from dramatiq import Actor, Broker, Message, MessageProxy, Middleware
from dramatiq.brokers.redis import RedisBroker

from housekeeping import Settings, enqueue_many
from tests.internals.app import installation
from tests.internals.brokers import redis as brokers
from tests.internals.core import redis_client
from tests.internals.database import CompiledQuery, PreparedQuery, database
from tests.simulator import haste, virtual
from tests.simulator.database import SimulatedDatabase
from tests.simulator.observed_store import NAMESPACE
from tests.simulator.redis_client import SimulatedRedis
from tests.simulator.virtual_threads import thread_locals_by_task
from tests.simulator.virtual_time import world
from tests.simulator.workload import declare
from tests.simulator.world import Process, World

_POLL_MS: Final = 15_000  # maximum wait of an idle consumer, short enough for its heartbeat


def _trip(name: str, effect: Callable[[], Any]) -> Any:
    return world().io("redis", name, effect)


CLIENT: Final = SimulatedRedis(lambda: world().shared["redis"], _trip)
DATABASE: Final = SimulatedDatabase(lambda: world().shared["postgres"])
SETTINGS: Final = Settings.load(redis_url="redis://simulated/0", namespace=NAMESPACE)


def connect() -> None:
    """Replace Redis and the database in this interpreter."""
    virtual.install({redis_client: lambda _: CLIENT})
    thread_locals_by_task(DATABASE)
    database.initialize(DATABASE)
    single: Any = CompiledQuery
    single.rows = lambda statement, *values: DATABASE.rows(statement, *values)
    several: Any = PreparedQuery
    several.rows_at_once = lambda statement, *values: DATABASE.rows_at_once(statement, *values)
    haste.install()


class _Watch(Middleware):
    """Middleware that records how messages end."""

    def __init__(self, here: World) -> None:
        self._world = here

    def after_skip_message(self, broker: Broker, message: MessageProxy) -> None:
        self._world.note("skipped", message.actor_name, message.message_id, str(sys.exception()))

    def after_process_message(
        self, broker: Broker, message: MessageProxy, *, result: Any = None, exception: BaseException | None = None
    ) -> None:
        if exception is not None:
            self._world.note(
                "interrupted", message.actor_name, str(message.args), message.message_id, type(exception).__name__
            )


def _note_drops(here: World, broker: RedisBroker) -> None:
    enqueue = broker.enqueue

    def noting(message: Message[Any], *, delay: int | None = None) -> Message[Any]:
        sent = enqueue(message, delay=delay)
        if "duplicate_of" in sent.options:
            here.note("dropped", message.message_id, message.actor_name, sent.options["duplicate_of"])
        return sent

    broker.enqueue = noting  # type: ignore[method-assign]


@dataclass
class Application:
    """Memory of one process of the application."""

    process: Process
    broker: RedisBroker
    actors: dict[str, Actor[..., Any]]
    worker: dramatiq.worker.Worker | None = None
    stopping: bool = False


@dataclass
class Cast:
    """Processes of a schedule and their restarts.

    Attributes:
      restarts: Whether a process that ended is started again.
    """

    world: World
    names: list[str]
    threads: int
    restarts: bool = True
    applications: dict[Process, Application] = field(default_factory=dict)
    _number: int = 0

    def application(self, process: Process) -> Application:
        """Return the application's code as loaded by this process."""
        broker = brokers.redis_broker(SETTINGS)
        installation.install(broker, SETTINGS, workers=False)
        for middleware in broker.middleware:
            thread_locals_by_task(middleware)
        broker.add_middleware(_Watch(self.world))
        _note_drops(self.world, broker)
        made = Application(process, broker, declare(self.world, broker, self.names))
        self.applications[process] = made
        return made

    def start(self, kind: str, main: Callable[[Application], object]) -> Process:
        """Start a process and restart it whenever it ends."""
        self._number += 1
        process = self.world.process(f"{kind}{self._number}")
        process.at_death.append(lambda: self._after_death(process, kind, main))
        self.world.spawn(process, "main", lambda: main(self.application(process)))
        return process

    def worker(self, application: Application) -> None:
        """Run ``dramatiq housekeeping.app``."""
        application.worker = dramatiq.worker.Worker(
            application.broker, worker_timeout=_POLL_MS, worker_threads=self.threads
        )
        application.worker.start()

    def scheduler(self, application: Application) -> None:
        """Run ``periodiq housekeeping.app`` with its own loop and the virtual clock."""
        scheduled = [actor for actor in application.actors.values() if "periodic" in actor.options]
        loop = periodiq.Scheduler(scheduled)
        asleep_s: list[float] = []
        module: Any = periodiq
        while True:
            module.alarm, module.signal = asleep_s.append, lambda *_: None
            loop.schedule()
            self.world.sleep(asleep_s.pop() if asleep_s else 0.0)

    def sender(self, application: Application) -> None:
        """Send messages like an application, some of them several times."""
        rng, here = self.world.rng, self.world
        plain = [actor for name, actor in application.actors.items() if "periodic" not in actor.options]
        for _ in range(rng.randint(3, 9) if plain else 0):
            here.sleep(rng.choice((0.0, 0.2, 2.0, 12.0)))
            actor = rng.choice(plain)
            arguments = () if "sweep" in actor.options else (rng.choice((1, 1, 2)),)
            way = rng.random()
            here.note("sends", actor.actor_name, arguments)
            try:
                if way < 0.1:
                    sent = enqueue_many(actor, [arguments] * 2)
                elif way < 0.25:
                    sent = [actor.send_with_options(args=arguments, delay=rng.choice((500, 8000)))]
                else:
                    sent = [actor.send(*arguments)]
            except Exception as error:
                here.note("not sent", actor.actor_name, arguments, repr(error))
                continue
            for message in sent:
                here.note("sent", actor.actor_name, arguments, message.message_id, message.options.get("duplicate_of"))

    def stop(self, process: Process) -> None:
        """SIGTERM."""
        application = self.applications.get(process)
        if application is None or application.worker is None:
            self.world.kill(process)
        elif not application.stopping:
            application.stopping = True
            self.world.note("told to stop", process.name)
            self.world.spawn(process, "stop", lambda: self._shut_down(application))

    def _shut_down(self, application: Application) -> None:
        assert application.worker is not None
        application.worker.stop()
        self.world.note("stopped", application.process.name)
        self.world.kill(application.process)

    def _after_death(self, process: Process, kind: str, main: Callable[[Application], object]) -> None:
        self.world.shared["postgres"].close(process.tasks)
        if self.restarts and kind != "sender":
            pause = self.world.rng.choice((0.5, 5.0, 20.0))
            supervisor = self.world.shared["supervisor"]
            self.world.spawn(supervisor, f"restart of {kind}", lambda: self.restarts and self.start(kind, main), pause)
