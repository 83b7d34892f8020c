"""What runs in the background: ``DJANGO_SETTINGS_MODULE=on_django.settings dramatiq on_django.tasks``."""

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
from on_django.database import database_url

django.setup()

from on_django.models import Reminder  # noqa: E402 - models can be imported only now


class DjangoConnections(Middleware):
    """The application's own: no message is given a connection that is dead or too old."""

    def before_process_message(self, broker: Broker, message: MessageProxy) -> None:
        close_old_connections()


broker = RedisBroker(url=settings.REDIS_URL)
broker.add_middleware(DjangoConnections())
housekeeping.install(broker, housekeeping.Settings.load(database_url=database_url()), workers=False)
dramatiq.set_broker(broker)


@dramatiq.actor(
    idempotent=True,
    exclusive_lease={"key": "reminders", "ttl": timedelta(minutes=10)},
    schedule="*/5 * * * *",
)
def send_reminders() -> None:
    """Mark what is due as sent, in one transaction that only the holder of the lease can commit."""
    with transaction.atomic():
        Reminder.objects.filter(sent_at=None, due_at__lte=timezone.now()).update(sent_at=timezone.now())
        housekeeping.fence(connection.connection)  # the driver's, in Django's transaction
