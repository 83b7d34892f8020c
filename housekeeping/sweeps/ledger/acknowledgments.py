"""Acknowledged alerts: an operator knows of them, and the dashboard shows them apart."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final

from peewee import EXCLUDED

from housekeeping.core.sanitize import in_one_line
from housekeeping.core.settings import MAIN
from housekeeping.database.connection import database, translate_postgres_errors
from housekeeping.sweeps.ledger.models import NOW, Acknowledgment

#: An alert that lasts longer is shown again.
VALID_FOR: Final = timedelta(days=1)
_MAX_USER: Final = 200  # characters

#: A worker's name, empty for an alert of the whole installation, and the alert's name.
AlertKey = tuple[str, str]


@dataclass(frozen=True, slots=True)
class Acknowledged:
    """Who acknowledged an alert, and when."""

    user: str
    at: datetime

    def covers(self, since: datetime | None) -> bool:
        """Return whether the acknowledgment applies to an alert that began then, or at an unknown time (None)."""
        return since is None or since <= self.at


def acknowledged_by(
    known: Mapping[AlertKey, Acknowledged], worker: str, alert: str, since: datetime | None
) -> Acknowledged | None:
    """Return the acknowledgment of an alert that began at a time; None if it has none, or began later."""
    found = known.get((worker, alert))
    return found if found is not None and found.covers(since) else None


def acknowledge(alerts: Iterable[AlertKey], user: str) -> None:
    """Acknowledge active alerts for a day, in the database ``main``, and remove the outdated acknowledgments.

    Raises:
      DatabaseUnavailable: The database does not answer; nothing was changed.
    """
    with database.using(MAIN), translate_postgres_errors(), database.atomic():
        Acknowledgment.delete().where(Acknowledgment.at < NOW - VALID_FOR).execute()
        rows = [
            {"worker": worker, "alert": alert, "at": NOW, "user_name": in_one_line(user, _MAX_USER)}
            for worker, alert in sorted(set(alerts))
        ]
        if rows:
            Acknowledgment.insert_many(rows).on_conflict(
                conflict_target=[Acknowledgment.worker, Acknowledgment.alert],
                update={Acknowledgment.at: NOW, Acknowledgment.user_name: EXCLUDED.user_name},
            ).execute()


def acknowledgments() -> dict[AlertKey, Acknowledged]:
    """Return the valid acknowledgments of the current database."""
    rows: Any = Acknowledgment.select().where(Acknowledgment.at >= NOW - VALID_FOR)
    return {(row.worker, row.alert): Acknowledged(row.user_name, row.at) for row in rows}
