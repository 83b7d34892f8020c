"""Background tasks: ``DJANGO_SETTINGS_MODULE=on_django.settings dramatiq on_django.tasks``."""

from __future__ import annotations

from datetime import timedelta

import django
import dramatiq
from django.conf import settings
from django.db import close_old_connections, connection, transaction
from django.utils import timezone
from dramatiq import Broker, MessageProxy, Middleware
from dramatiq.brokers.redis import RedisBroker

import housekeeping
from housekeeping.contrib.django import load_settings

django.setup()

from on_django.models import Reminder  # noqa: E402 - needs django.setup()


class DjangoConnections(Middleware):
    """Middleware of the application that closes dead and old connections."""

    def before_process_message(self, broker: Broker, message: MessageProxy) -> None:
        close_old_connections()


broker = RedisBroker(url=settings.REDIS_URL)
broker.add_middleware(DjangoConnections())
housekeeping.install(broker, load_settings(), workers=False)
dramatiq.set_broker(broker)


@dramatiq.actor(
    idempotent=True,
    exclusive_lease={"key": "reminders", "ttl": timedelta(minutes=10), "fenced": True},
    schedule="*/5 * * * *",
)
def send_reminders() -> None:
    """Mark due reminders as sent, in a transaction that only the lease holder can commit."""
    with transaction.atomic():
        Reminder.objects.filter(sent_at=None, due_at__lte=timezone.now()).update(sent_at=timezone.now())
        housekeeping.fence(connection.connection)  # the driver's, in Django's transaction
