"""Background tasks: ``dramatiq on_sqlalchemy.tasks``."""

from __future__ import annotations

import os
from datetime import UTC, datetime, timedelta

import dramatiq
from dramatiq.brokers.redis import RedisBroker
from sqlalchemy import create_engine, update
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column, sessionmaker
from sqlalchemy.types import DateTime

import housekeeping
from on_sqlalchemy.database import database_url

engine = create_engine(os.environ["REMINDERS_DATABASE_URL"])
Session = sessionmaker(engine)


class Base(DeclarativeBase):
    """Base of the application's tables."""


class Reminder(Base):
    """Reminder to send once when it is due."""

    __tablename__ = "reminders"

    id: Mapped[int] = mapped_column(primary_key=True)
    text: Mapped[str]
    due_at: Mapped[datetime] = mapped_column(DateTime(timezone=True))
    sent_at: Mapped[datetime | None] = mapped_column(DateTime(timezone=True))


broker = RedisBroker(url=os.environ["REMINDERS_REDIS_URL"])
housekeeping.install(broker, housekeeping.Settings.load(database_url=database_url(engine)), workers=False)
dramatiq.set_broker(broker)


@dramatiq.actor(
    idempotent=True,
    exclusive_lease={"key": "reminders", "ttl": timedelta(minutes=10), "fenced": True},
    schedule="*/5 * * * *",
)
def send_reminders() -> None:
    """Mark due reminders as sent, in a transaction that only the lease holder can commit."""
    now = datetime.now(UTC)
    with Session.begin() as session:
        session.execute(update(Reminder).where(Reminder.sent_at.is_(None), Reminder.due_at <= now).values(sent_at=now))
        housekeeping.fence(
            session.connection().connection.driver_connection
        )  # the driver's, in the session's transaction
