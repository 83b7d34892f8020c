"""Puts the library on a broker: middleware, database, Redis, the built-in workers and one's own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import redis
from dramatiq import Actor, Broker
from dramatiq.brokers.redis import RedisBroker
from dramatiq.middleware import Middleware

from housekeeping.brokers import harden, message_broker
from housekeeping.core.errors import DeclarationError
from housekeeping.core.redis_client import redis_client, shared_redis
from housekeeping.core.settings import Settings
from housekeeping.database.connection import connect_to, database
from housekeeping.middleware import standard_middleware
from housekeeping.middleware.enqueueing.path import replace_enqueue
from housekeeping.middleware.telemetry.run_log import RunLog
from housekeeping.sweeps.declaration import Sweep
from housekeeping.sweeps.ledger import schema
from housekeeping.sweeps.registration import register
from housekeeping.workers import configured_sweeps, only


def install(
    broker: Broker, settings: Settings | None = None, workers: bool = True, sweeps: Sequence[Sweep] = ()
) -> dict[str, Actor[..., Any]]:
    """Add the library's middleware, its workers, and an application's own sweeps, to the application's broker.

    Call it before declaring actors that use the library's options. The broker keeps middleware of
    its own, Dramatiq's with the parameters it was given; only periodiq's goes, which drops retries, and
    Dramatiq's ``Retries`` and ``ShutdownNotifications`` become ours.

    Parameters:
      settings: Read from the environment unless given.
      workers: Whether to declare the built-in workers, and those of the modules in ``HOUSEKEEPING_SWEEPS``. They need
        the database.
      sweeps: The application's own, which need it as well. One that ``HOUSEKEEPING_SWEEPS`` names, too, is there once.

    Returns:
      The actors of workers and sweeps by name.

    Raises:
      SettingsError: When a setting is missing or wrong.
      DeclarationError: When the broker has the middleware already, or two sweeps have the same name.
    """
    settings = settings or Settings.load()
    if any(isinstance(middleware, RunLog) for middleware in broker.middleware):
        raise DeclarationError("housekeeping is installed on this broker already")
    client = _client(broker, settings)
    if workers or sweeps:
        settings.require_database_url()
    declared = configured_sweeps(settings, sweeps) if workers else only(settings, sweeps)
    harden(broker)  # first: what follows takes hold of the broker's own `enqueue`
    _arrange(broker, standard_middleware(client, settings, broker.middleware))
    shared_redis.use(client, settings.namespace)
    if settings.database_url is not None:
        use_database(settings)
    return {name: register(broker, sweep) for name, sweep in declared.items()}


def use_database(settings: Settings) -> None:
    """Point every table at the database of the settings; nothing is connected yet.

    Raises:
      SettingsError: When its URL is missing or cannot be read.
    """
    database.initialize(connect_to(settings.require_database_url()))
    schema.use_schema(settings.schema_name)


def broker_beside(settings: Settings, sweeps: Mapping[str, Sweep]) -> Broker:
    """The broker with the actors of these sweeps, but without the database, whose handle the caller is using.

    Raises:
      SettingsError: When a setting that it needs is missing.
    """
    broker = message_broker(settings)
    install(broker, settings.model_copy(update={"database_url": None}), workers=False)
    for sweep in sweeps.values():
        register(broker, sweep)
    return broker


def _client(broker: Broker, settings: Settings) -> redis.Redis:
    if settings.redis_url is None and isinstance(broker, RedisBroker):
        client: redis.Redis = broker.client
        return client
    return redis_client(settings.require_redis_url())


def _arrange(broker: Broker, middleware: list[Middleware]) -> None:
    """Put this middleware on the broker in place of what it has, also around actors declared before."""
    added = [one for one in middleware if one not in broker.middleware]
    broker.actor_options |= {option for one in added for option in one.actor_options}
    for actor in broker.actors.values():
        for one in added:
            one.before_declare_actor(broker, actor)
    broker.middleware[:] = middleware
    replace_enqueue(broker)
