"""Broker of the application, with one additional call."""

from __future__ import annotations

import os
from contextvars import ContextVar
from typing import Any

import dramatiq
import redis
from dramatiq import Broker, Message, MessageProxy, Middleware
from dramatiq.brokers.redis import RedisBroker

import housekeeping

#: Tenant of the current message.
tenant: ContextVar[str] = ContextVar("tenant", default="nobody")


class Tenants(Middleware):
    """Middleware of the application that passes the tenant on to the actor."""

    def before_enqueue(self, broker: Broker, message: Message[Any], delay: int | None) -> None:
        message.options.setdefault("tenant", tenant.get())

    def before_process_message(self, broker: Broker, message: MessageProxy) -> None:
        tenant.set(message.options.get("tenant", "nobody"))


client = redis.Redis.from_url(os.environ["INVOICES_REDIS_URL"])
broker = RedisBroker(client=client, namespace="invoices")
broker.add_middleware(Tenants())

# Call this before declaring actors, so that they can use the options. Leases and keys are stored in this broker's Redis
# unless HOUSEKEEPING_REDIS_URL names another. Without HOUSEKEEPING_DATABASE_URL, no database is needed.
housekeeping.install(broker, workers=False)
dramatiq.set_broker(broker)
