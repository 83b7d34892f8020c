"""Settings to broker: `install` on an application's broker, `use` without one, ``dramatiq housekeeping.app``.

``from housekeeping.app import broker, actors`` reads the settings from the environment and makes a broker with all
workers. An application that imports them to send messages keeps its own logging and Dramatiq's global broker. Only a
process that was started with this module as its broker logs by the settings and uses this broker as the global one. An
application with a broker of its own calls `housekeeping.install` instead. One without Dramatiq, such as a Celery or arq
worker or a FastAPI application, calls `housekeeping.use`.
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
from housekeeping.erasures import declare, use_settings
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


#: Settings and sweeps of `use`.
_used: tuple[Settings, dict[str, Sweep]] | None = None
_USING: Final = threading.RLock()


def use(
    settings: Settings | None = None, *, database_url: str | None = None, redis_url: str | None = None
) -> dict[str, Sweep]:
    """Use databases and Redis in this process for leases, fencing and runs of sweeps, without a broker.

    ::

        SWEEPS = housekeeping.use()
        housekeeping.run_sweep(SWEEPS["shop.expired_sessions"]).raise_for_failure()

    Call it once, where the process starts. Nothing is connected, and no thread starts. Each thread connects with its
    first statement. Nothing is to be closed at the end: a lease that is still held expires.

    Processes that are forked later, such as those of Celery, connect by themselves, and hold none of their parent's
    leases. A second call with the same settings does nothing. The sweeps are those of ``HOUSEKEEPING_SWEEPS`` and the
    built-in ones, by name and with their settings.

    Parameters:
      settings: Read from the environment unless given.
      database_url: In place of ``HOUSEKEEPING_DATABASE_URL``.
      redis_url: In place of ``HOUSEKEEPING_REDIS_URL``. If neither is given, PostgreSQL has the leases, as with
        ``housekeeping serve``. All processes of an installation must have the same servers.

    Raises:
      SettingsError: A setting is missing or wrong.
      DeclarationError: It was called with other settings before, with settings and URLs, or two sweeps have the same
        name.
    """
    global _used
    given = {"database_url": database_url, "redis_url": redis_url}
    urls = {name: url for name, url in given.items() if url is not None}
    if settings is not None and urls:
        raise DeclarationError(f"use() has both settings and {' and '.join(urls)}; put the URLs into the settings")
    settings = settings or Settings.load(**urls)
    settings.require_database_url()
    with _USING:
        if _used is not None and _used[0] == settings:
            return dict(_used[1])
        if _used is not None:
            raise DeclarationError("use() was called before with other settings; call it once in each process")
        if settings.redis_url is not None or settings.broker_url is not None:
            shared_redis.use(redis_client(settings.require_redis_url()), settings.namespace)
        elif shared_redis.client is None:  # otherwise it is that of a broker
            shared_redis.use(None, settings.namespace)
        sweeps = configured_sweeps(settings)
        pings.use(settings)
        use_database(settings)
        use_settings(settings)
        _used = settings, sweeps
        return dict(sweeps)


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
