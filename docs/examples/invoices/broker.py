"""The application's broker, as it was, and one call more."""

from __future__ import annotations

import os
from contextvars import ContextVar
from typing import Any

import dramatiq
import redis
from dramatiq import Broker, Message, MessageProxy, Middleware
from dramatiq.brokers.redis import RedisBroker

import housekeeping

#: Whose invoice the thread is at work on.
tenant: ContextVar[str] = ContextVar("tenant", default="nobody")


class Tenants(Middleware):
    """The application's own: a message remembers for whom it was sent, and its actor is told."""

    def before_enqueue(self, broker: Broker, message: Message[Any], delay: int | None) -> None:
        message.options.setdefault("tenant", tenant.get())

    def before_process_message(self, broker: Broker, message: MessageProxy) -> None:
        tenant.set(message.options.get("tenant", "nobody"))


client = redis.Redis.from_url(os.environ["INVOICES_REDIS_URL"])
broker = RedisBroker(client=client, namespace="invoices")
broker.add_middleware(Tenants())

# Before any actor is declared, because actors may then use the options. The leases and keys live on this broker's own
# Redis unless HOUSEKEEPING_REDIS_URL names another, and without HOUSEKEEPING_DATABASE_URL no database is needed.
housekeeping.install(broker, workers=False)
dramatiq.set_broker(broker)
