"""Application with an actor whose arguments change between two releases."""

from __future__ import annotations

from typing import Any, Final

import dramatiq

import housekeeping
from housekeeping import Settings
from tests.chaos.shortened import shorten_if_asked
from tests.internals.brokers import redis_broker
from tests.internals.core import logs
from tests.internals.database import database

ACTOR: Final = "shop.charge"
#: Options of the actor in both releases.
CHARGE: Final[dict[str, Any]] = {"actor_name": ACTOR, "idempotent": True, "deduplicate": "until_executed"}


def compose() -> dramatiq.Broker:
    """Return the broker of both releases."""
    shorten_if_asked()
    settings = Settings.load()
    logs.configure(settings.log_level, settings.log_format)
    broker = redis_broker(settings)
    dramatiq.set_broker(broker)
    housekeeping.install(broker, settings, workers=False)
    return broker


def charge(order: int, currency: str, release: str) -> None:
    """Record a charge with the release."""
    database.execute_sql("INSERT INTO charges VALUES (%s, %s, %s)", (order, currency, release))
