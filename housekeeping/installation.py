"""Installation of the library on a broker: middleware, database, Redis and workers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import redis
from dramatiq import Actor, Broker
from dramatiq.brokers.redis import RedisBroker
from dramatiq.middleware import Middleware

from housekeeping.brokers import harden, message_broker
from housekeeping.core.errors import DeclarationError
from housekeeping.core.redis.client import redis_client, shared_redis
from housekeeping.core.settings import Settings
from housekeeping.middleware import standard_middleware
from housekeeping.middleware.enqueueing.path import replace_enqueue
from housekeeping.middleware.hooks import call_defined_hooks_only
from housekeeping.middleware.telemetry.run_log import RunLog
from housekeeping.sweeps.declaration import Sweep
from housekeeping.sweeps.ledger.schema import use_database
from housekeeping.sweeps.registration import register
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
        the database.
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
    client = _client(broker, settings)
    if workers or sweeps:
        settings.require_database_url()
    declared = configured_sweeps(settings, sweeps) if workers else only(settings, sweeps)
    harden(broker)  # first, because the middleware wraps the broker's `enqueue`
    _replace_middleware(broker, standard_middleware(client, settings, broker.middleware))
    shared_redis.use(client, settings.namespace)
    if settings.database_url is not None:
        use_database(settings)
    return {name: register(broker, sweep) for name, sweep in declared.items()}


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
    return broker


def _client(broker: Broker, settings: Settings) -> redis.Redis:
    if settings.redis_url is None and isinstance(broker, RedisBroker):
        client: redis.Redis = broker.client
        return client
    return redis_client(settings.require_redis_url())


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
