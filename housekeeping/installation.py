"""Puts the library on a broker: middleware, database, Redis and the built-in workers."""

from __future__ import annotations

from typing import Any

import redis
from dramatiq import Actor, Broker
from dramatiq.brokers.redis import DEFAULT_MAINTENANCE_CHANCE, MAINTENANCE_SCALE, RedisBroker
from dramatiq.middleware import Middleware

from housekeeping.foundation.db import connect_to, database
from housekeeping.foundation.errors import DeclarationError, SettingsError
from housekeeping.foundation.redis_client import redis_client, shared_redis
from housekeeping.foundation.settings import Settings, WorkerSettings
from housekeeping.middleware import standard_middleware
from housekeeping.middleware.enqueueing import accept_skips
from housekeeping.middleware.run_log import RunLog
from housekeeping.middleware.schedule import Schedule
from housekeeping.sweeps import schema
from housekeeping.sweeps.actor import register
from housekeeping.sweeps.declaration import Sweep
from housekeeping.workers import BUILT_IN


def install(broker: Broker, settings: Settings | None = None, workers: bool = True) -> dict[str, Actor[..., Any]]:
    """Add the library's middleware, and its workers, to an application's broker.

    Call it before declaring actors that use the library's options. The broker keeps middleware of
    its own; those of Dramatiq's that ours replace or must stand around are put in place.

    Parameters:
      settings: Read from the environment unless given.
      workers: Whether to declare the built-in workers, which need the database.

    Returns:
      The workers' actors by name; none without workers.

    Raises:
      SettingsError: When a setting is missing or wrong.
      DeclarationError: When the broker has the middleware already.
    """
    settings = settings or Settings.load()
    if any(isinstance(middleware, RunLog) for middleware in broker.middleware):
        raise DeclarationError("housekeeping is installed on this broker already")
    client = _client(broker, settings)
    shared_redis.use(client, settings.namespace)
    if workers:
        settings.require_database_url()
    if settings.database_url is not None:
        use_database(settings)

    schedule = _arrange(broker, standard_middleware(client, settings))
    accept_skips(broker, schedule)
    if isinstance(broker, RedisBroker) and broker.maintenance_chance == DEFAULT_MAINTENANCE_CHANCE:
        # Dramatiq's default returns a killed worker's messages after about 10 minutes.
        broker.maintenance_chance = MAINTENANCE_SCALE
    if not workers:
        return {}
    return {name: register(broker, sweep) for name, sweep in configured_sweeps(settings).items()}


def use_database(settings: Settings) -> None:
    """Point every table at the database of the settings; nothing is connected yet.

    Raises:
      SettingsError: When its URL is missing or cannot be read.
    """
    database.initialize(connect_to(settings.require_database_url()))
    schema.use_schema(settings.schema_name)


def configured_sweeps(settings: Settings) -> dict[str, Sweep]:
    """The built-in workers by name, with what the settings say of them.

    Raises:
      SettingsError: When ``HOUSEKEEPING_WORKERS`` names a worker or says a thing that there is not.
    """
    modules: dict[str, Any] = {module.sweep.name: module for module in BUILT_IN}
    for name in settings.workers:
        if name not in modules:
            raise SettingsError(
                f'HOUSEKEEPING_WORKERS["{name}"] is not a worker; the workers are {", ".join(sorted(modules))}'
            )
    sweeps = {}
    for name, module in modules.items():
        given = settings.workers.get(name, WorkerSettings())
        if given.table is not None:
            (model,) = module.MODELS.values()
            *schema_name, table = given.table.split(".")
            model._meta.set_table_name(table)
            model._meta.schema = schema_name[0] if schema_name else None
        sweeps[name] = module.sweep.configured(given)
    return sweeps


def _client(broker: Broker, settings: Settings) -> redis.Redis:
    if settings.redis_url is None and isinstance(broker, RedisBroker):
        client: redis.Redis = broker.client
        return client
    return redis_client(settings.require_redis_url())


def _arrange(broker: Broker, ours: list[Middleware]) -> Schedule:
    """Replace the broker's middleware by ours and what it has besides, in an order that keeps ours."""
    replaced = tuple(type(middleware) for middleware in ours) + tuple(
        base
        for middleware in ours
        for base in type(middleware).__mro__
        if base.__module__.startswith("dramatiq.") and base is not Middleware
    )
    others = [middleware for middleware in broker.middleware if type(middleware) not in replaced]
    periodiq = [middleware for middleware in others if type(middleware).__name__ == "PeriodiqMiddleware"]
    broker.middleware[:] = []
    # Theirs first: an error tracker or metrics must see what ours skip; periodiq's own would drop late retries.
    for middleware in [*(other for other in others if other not in periodiq), *ours]:
        broker.add_middleware(middleware)
    return next(middleware for middleware in ours if isinstance(middleware, Schedule))
