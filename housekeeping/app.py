"""Settings to broker: `install` on an application's broker, and the ready-made ``dramatiq housekeeping.app``.

``from housekeeping.app import broker, actors`` reads the settings from the environment and makes a broker with all
workers. An application that imports them to send messages keeps its own logging and Dramatiq's global broker. Only a
process that was started with this module as its broker logs by the settings and uses this broker as the global one. An
application with a broker of its own calls `housekeeping.install` instead.
"""

from __future__ import annotations

import multiprocessing
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import dramatiq
import redis
from dramatiq import Actor, Broker
from dramatiq.brokers.redis import RedisBroker
from dramatiq.middleware import Middleware

from housekeeping.brokers import harden, message_broker
from housekeeping.brokers.dramatiq_internals import call_defined_hooks_only, imported_as_broker
from housekeeping.core import logs, telemetry
from housekeeping.core.errors import DeclarationError, HousekeepingError
from housekeeping.core.pings import pings
from housekeeping.core.redis import redis_client, shared_redis
from housekeeping.core.settings import Settings
from housekeeping.engine.registry import register
from housekeeping.erasures import declare
from housekeeping.ledger.schema import use_database
from housekeeping.middleware import standard_middleware
from housekeeping.middleware.enqueue import replace_enqueue
from housekeeping.middleware.observe import RunLog, exposition
from housekeeping.sweeps.declaration import Sweep
from housekeeping.workers import configured_sweeps, only


def install(
    broker: Broker, settings: Settings | None = None, workers: bool = True, sweeps: Sequence[Sweep] = ()
) -> dict[str, Actor[..., Any]]:
    """Add the library's middleware, its workers and an application's sweeps to a broker.

    Call this before declaring actors that use the library's options. The broker keeps its other middleware with their
    parameters. Three are replaced: periodiq, which drops retries, and Dramatiq's ``Retries`` and
    ``ShutdownNotifications``.

    Parameters:
      settings: Read from the environment unless given.
      workers: Whether to declare the built-in workers and those of the modules in ``HOUSEKEEPING_SWEEPS``. These need
        the database. False still declares ``housekeeping.old_runs`` if there is one, because leases and ticks write to
        it.
      sweeps: The application's sweeps, which need the database too. One that ``HOUSEKEEPING_SWEEPS`` also names is
        declared once.

    Returns:
      The actors of workers and sweeps by name.

    Raises:
      SettingsError: When a setting is missing or wrong.
      DeclarationError: When the library is already installed on the broker, or two sweeps have the same name.
    """
    settings = settings or Settings.load()
    if any(isinstance(middleware, RunLog) for middleware in broker.middleware):
        raise DeclarationError("housekeeping is installed on this broker already")
    if settings.redis_url is None and isinstance(broker, RedisBroker):
        client: redis.Redis = broker.client
    else:
        client = redis_client(settings.require_redis_url())
    if workers or sweeps:
        settings.require_database_url()
    shared_redis.use(client, settings.namespace)
    declared = configured_sweeps(settings, sweeps) if workers else only(settings, sweeps)
    harden(broker)  # first, because the middleware wraps the broker's `enqueue`
    watch = None if settings.database_url is None else _Watch(settings, declared)
    _replace_middleware(broker, standard_middleware(client, settings, broker.middleware, watch))
    pings.use(settings)
    if settings.database_url is not None:
        use_database(settings)
    actors = {name: register(broker, sweep) for name, sweep in declared.items()}
    return {**actors, **declare(broker, settings, declared.values())}


class _Watch:
    """Look at the installation by one of its processes every half minute, so that alerts need no reader."""

    def __init__(self, settings: Settings, sweeps: dict[str, Sweep]) -> None:
        self._settings, self._sweeps = settings, sweeps
        self._watch: Any = None

    def __call__(self) -> None:
        from housekeeping.insight.webhook import InstallationWatch  # only in workers and schedulers

        self._watch = self._watch or InstallationWatch(self._settings, self._sweeps)
        self._watch.look()


def broker_without_database(settings: Settings, sweeps: Mapping[str, Sweep]) -> Broker:
    """Return a broker with the actors of these sweeps that leaves the caller's database connection alone.

    Raises:
      SettingsError: When a required setting is missing.
    """
    broker = message_broker(settings)
    without = settings.model_copy(update={"database_url": None, "databases": {}, "replica_urls": ()})
    install(broker, without, workers=False)
    for sweep in sweeps.values():
        register(broker, sweep)
    declare(broker, settings, sweeps.values())
    return broker


def _replace_middleware(broker: Broker, middleware: list[Middleware]) -> None:
    """Replace the broker's middleware, and apply the new one to actors that were declared before."""
    added = [one for one in middleware if one not in broker.middleware]
    broker.actor_options |= {option for one in added for option in one.actor_options}
    for actor in broker.actors.values():
        for one in added:
            one.before_declare_actor(broker, actor)
    broker.middleware[:] = middleware
    call_defined_hooks_only(broker)
    replace_enqueue(broker)


#: Whether this is a process of ``dramatiq housekeeping.app`` or ``periodiq housekeeping.app``.
_SERVING: Final = imported_as_broker(__name__)
_MAKING: Final = threading.Lock()


def _create() -> dict[str, Any]:
    settings = Settings.load()
    if _SERVING:
        logs.configure(settings.log_level, settings.log_format)
        if settings.sentry_dsn is not None:
            telemetry.report_to_sentry(settings.sentry_dsn)
    broker = message_broker(settings)
    # Only in Dramatiq's worker processes. Other processes, such as a scheduler, serve no metrics.
    if settings.metrics_port is not None and multiprocessing.parent_process() is not None:
        broker.add_middleware(exposition(settings))
    actors = install(broker, settings)
    if _SERVING:
        dramatiq.set_broker(broker)
    return {"broker": broker, "actors": actors}


if TYPE_CHECKING:
    broker: Broker
    actors: dict[str, Actor[..., Any]]
else:  # made when an application imports one of them

    def __getattr__(name: str) -> Any:
        if name not in ("broker", "actors"):
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        with _MAKING:
            if name not in globals():
                globals().update(_create())
        return globals()[name]


if _SERVING:
    try:
        globals().update(_create())
    except HousekeepingError as error:
        # In dramatiq and periodiq a traceback would hide the one line that helps. Every worker process of dramatiq
        # imports this module; only the first one reports.
        if multiprocessing.current_process().name in ("MainProcess", "Process-1"):
            sys.stderr.write(f"housekeeping: {error}\n")
            sys.stderr.flush()
        raise SystemExit(error.exit_code) from None
