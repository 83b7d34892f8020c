"""The database's times between the batches of a run."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime

from psycopg2.extensions import connection as Connection


@dataclass
class DatabaseTimes:
    """Times read from another session, in order; `note` fits `run_sweep(on_batch=...)`."""

    admin: Connection
    noted: list[datetime] = field(default_factory=list)

    def note(self, *counts: object) -> None:
        with self.admin.cursor() as cursor:
            cursor.execute("SELECT clock_timestamp()")
            row = cursor.fetchone()
        assert row is not None
        self.noted.append(row[0].astimezone(UTC))

    def batch_of(self, moment: datetime) -> int | None:
        """The number of the batch, from 0, within which the moment lies; None if before or after all of them."""
        between = zip(self.noted, self.noted[1:], strict=False)
        return next((number for number, (first, last) in enumerate(between) if first <= moment <= last), None)
