"""Tables and a sweep of an application, and sweeps with one fault each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final

from peewee import BigAutoField, ForeignKeyField, IntegerField

from housekeeping import BaseModel, Call, Delete, Lease, Limits, Rows, Sweep, UtcDateTimeField
from tests.internals.database import database
from tests.internals.sweeps import Batch, BatchResult, TableStage, Write

NOW: Final = datetime(2026, 5, 1, tzinfo=UTC)


class Session(BaseModel):
    id = BigAutoField()
    expires_at = UtcDateTimeField()
    seen = IntegerField(default=0)


class Note(BaseModel):
    session = ForeignKeyField(Session, on_delete="CASCADE")


#: Sessions with notes are not deleted.
NO_CASCADE: Final = (
    "ALTER TABLE note DROP CONSTRAINT note_session_id_fkey, ADD FOREIGN KEY (session_id) REFERENCES session (id)"
)


def fill(stale: int = 3, kept: int = 2) -> None:
    """Create expired sessions, and some that expire later, each with a note."""
    for n in range(stale + kept):
        session = Session.create(expires_at=NOW + timedelta(hours=n - stale, seconds=1))
        Note.create(session=session)


def sweep(action: Any = None, lease: Lease | None = None) -> Sweep:
    return Sweep(
        "sessions.expired",
        Rows(Session, stale=lambda row, now: row.expires_at <= now, order="expires_at", action=action or Delete()),
        lease=lease,
        limits=Limits(batch=2, batch_takes=None),
    )


class Count(Delete):
    """Action that counts rows and leaves them stale."""

    def write(self, table: TableStage, batch: Batch, chosen: Any) -> Write:
        update: Any = Session.update(seen=Session.seen + 1).where(chosen).returning(Session.id)
        return Write([update.cte("counted")], self.counted_as)


@dataclass(frozen=True, kw_only=True)
class EarlyPass(TableStage):
    """Sweep that changes rows before the batch's transaction, so that a repetition changes them twice."""

    def prepare(self, batch: Batch) -> None:
        ids: Any = [row.id for row in self.rows(batch).select(Session.id)]
        Session.update(seen=Session.seen + 1).where(Session.id.in_(ids)).execute()
        # Also changes the next row, which the batch does not delete.
        Session.update(seen=Session.seen + 1).where(Session.expires_at > batch.now).execute()


def early() -> Sweep:
    """Sweep with effects before the transaction, so that a repeated run has some effects twice."""
    return staged("sessions.early", EarlyPass)


@dataclass(frozen=True, kw_only=True)
class ForgetfulPass(TableStage):
    """Action that commits its rows before the engine writes the counts."""

    def apply(self, batch: Batch, prepared: None = None) -> BatchResult:
        result = TableStage.apply(self, batch, prepared)
        database.execute_sql("COMMIT")
        database.execute_sql("BEGIN")
        return result


def forgetful() -> Sweep:
    """Sweep whose rows and counts are not committed together."""
    return staged("sessions.forgetful", ForgetfulPass)


@dataclass(frozen=True, kw_only=True)
class OvertakenPass(TableStage):
    """Stage that processes nothing if its run is resumed, as if the cursor were beyond all rows."""

    resumed: list[bool] = field(default_factory=list)

    def apply(self, batch: Batch, prepared: None = None) -> BatchResult:
        self.resumed.append(batch.after is not None)
        if self.resumed[0]:
            return BatchResult(position=(NOW.isoformat(), 99), exhausted=True)
        return TableStage.apply(self, batch, prepared)


def overtaken() -> Sweep:
    """Sweep whose resumed runs leave rows out."""
    return staged("sessions.overtaken", OvertakenPass)


def staged(name: str, stage: type[TableStage]) -> Sweep:
    """Sweep that deletes expired sessions in a stage of this type."""
    return Sweep(
        name,
        lambda sweep: [
            stage(
                name="rows",
                stale=lambda now: Session.expires_at <= now,
                order=(Session.expires_at, Session.id),
                action=Delete(),
                batch_size=2,
            )
        ],
    )


def archived(write: Callable[[Session], object]) -> Sweep:
    """Sweep that writes each session somewhere and then deletes it."""
    return sweep(Call(write, then=Delete()))


def appended_to(file: Path) -> Callable[[Session], object]:
    """Sweep that writes a session again when it is repeated."""

    def write(session: Session) -> None:
        with file.open("a") as stream:
            stream.write(f"{session.id}\n")

    return write


def replaced_in(folder: Path) -> Callable[[Session], object]:
    """Write a session atomically to its own file."""

    def write(session: Session) -> None:
        part = folder / f"{session.id}.part"
        part.write_text(f"{session.id}\n")
        part.rename(folder / f"{session.id}.txt")

    return write


def contents(folder: Path) -> dict[str, str]:
    """Return the contents of the folder's files."""
    return {path.name: path.read_text() for path in folder.iterdir()}


def empty(folder: Path) -> None:
    """Remove the folder's files."""
    for path in folder.iterdir():
        path.unlink()
