"""Server that a message reads from: the primary, or the replica that was chosen for it."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import TYPE_CHECKING, Final, Literal

from housekeeping.core.errors import SettingsError
from housekeeping.core.settings import MAIN
from housekeeping.core.telemetry.context import MessageContext, current_message
from housekeeping.database.connection import Database, database

if TYPE_CHECKING:
    from housekeeping.database.replicas.replica import Replica

#: Server that a message has read from.
ReadSource = Literal["primary", "replica"]


class ReadRouting:
    """Server that the current message reads one database from, chosen at its first read and kept until it ends.

    Parameters:
      message: The message.
      choose: Returns a replica, or None for the primary.
      name: Name of the database.
    """

    def __init__(self, message: MessageContext | None, choose: Callable[[], Replica | None], name: str = MAIN) -> None:
        self.message = message
        self.name = name
        self.used: ReadSource = "primary"
        self._choose = choose
        self._chosen: list[Replica | None] = []

    def database(self) -> Database:
        """Return the database of the chosen replica, or of the primary."""
        if not self._chosen:
            self._chosen.append(self._choose())
        return self._chosen[0] or primary_named(self.name)

    def uses(self, replica: Replica) -> bool:
        """Return whether the message reads from this replica and has not ended."""
        return self.message is current_message.get() and self._chosen[:1] == [replica]

    def use_primary(self) -> None:
        """Read from the primary until the message ends."""
        self._chosen = [None]


_NOWHERE: Final[dict[str, ReadRouting]] = {}
_routing: Final[ContextVar[dict[str, ReadRouting]]] = ContextVar("read_routing", default=_NOWHERE)


def routing_of(name: str) -> ReadRouting | None:
    """Return where the current message reads the database; None: not chosen for any message."""
    return _routing.get().get(name)


def set_read_routing(*routings: ReadRouting) -> None:
    """Set where the current message reads each database; other databases are read from their primaries."""
    _routing.set({each.name: each for each in routings})


def read_database(name: str = MAIN) -> Database:
    """Return the database that the current message may read from: a replica if its ``data_consistency`` allows one.

    ::

        @dramatiq.actor(data_consistency="sticky")
        def remind(user_id: int) -> None:
            unread = Notification.select().where(Notification.user_id == user_id).count(housekeeping.read_database())

    Parameters:
      name: Name of the database, from ``HOUSEKEEPING_DATABASES``.

    A replica is used if it has replayed what was committed before the message was sent. ``sticky`` waits up to half a
    second for one, and ``delayed`` tries once more some seconds later. If the replica fails, its statements run on the
    primary. Outside of a message, within a transaction of the library's database handle, and for all other actors the
    result is the primary.

    Note: A replica may lack what the message itself has written; read that from the primary. A replica is read-only.
      Select and lock rows that you change on the primary.

    Raises:
      SettingsError: If there is no such database, or ``HOUSEKEEPING_DATABASE_URL`` is not set.
    """
    primary = primary_named(name)
    routing = routing_of(name)
    if primary.in_transaction() or routing is None or routing.message is not current_message.get():
        return primary
    return routing.database()


def data_consistency_used() -> ReadSource:
    """Return ``replica`` if a read of the current message went to one, else ``primary``."""
    message = current_message.get()
    replica = any(each.used == "replica" and each.message is message for each in _routing.get().values())
    return "replica" if replica else "primary"


def primary_named(name: str) -> Database:
    """Return the primary of the database with this name.

    Raises:
      SettingsError: As `read_database`.
    """
    databases = database.by_name()
    if name not in databases and name != MAIN:
        raise SettingsError(
            f"there is no database {name!r}; the databases are {', '.join(databases)} (HOUSEKEEPING_DATABASES)"
        )
    if name not in databases:
        raise SettingsError(
            "HOUSEKEEPING_DATABASE_URL is not set; it should be a URL such as postgresql://host/database"
        )
    return databases[name]
