"""Handles of the configured databases: the one with a given name, or the current one of the thread."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Final

from peewee import DatabaseProxy

from housekeeping.core.settings import MAIN
from housekeeping.database.peewee_database import Database

#: The configured databases by name.
_databases: Final[dict[str, Database]] = {}
_current: Final[ContextVar[str]] = ContextVar("current_database", default=MAIN)


class DatabaseHandle(DatabaseProxy):
    """Proxy of the database with the given name, or of the database that is current in this thread.

    Its transactions are those of `Database`; peewee's proxy would begin plain ones.

    Parameters:
      name: None for the current database: `MAIN`, or within `using` another one.
    """

    def __init__(self, name: str | None = None) -> None:
        # peewee's proxies reject other attributes, and begin without a database.
        object.__setattr__(self, "_fixed_name", name)
        self._callbacks: list[Callable[[Any], object]] = []

    @property
    def selected(self) -> str:
        """The name of this handle's database."""
        name: str | None = self._fixed_name
        return name or _current.get()

    @property
    def obj(self) -> Database | None:
        """The database; None if there is none of this name."""
        return _databases.get(self.selected)

    @obj.setter
    def obj(self, database: Database | None) -> None:
        if database is None:
            _databases.pop(self.selected, None)
        else:
            _databases[self.selected] = database

    @staticmethod
    @contextmanager
    def using(name: str) -> Iterator[None]:
        """Make the database with this name the current one in the block, for this thread."""
        before = _current.set(name)
        try:
            yield
        finally:
            _current.reset(before)

    @staticmethod
    def by_name() -> dict[str, Database]:
        """Return every configured database by name, `MAIN` first."""
        return dict(sorted(_databases.items(), key=lambda each: each[0] != MAIN))

    @staticmethod
    def several() -> bool:
        """Return whether several databases are configured, so that texts must name them."""
        return len(_databases) > 1

    def transaction(self, *args: Any, **kwargs: Any) -> Any:
        return self.__getattr__("transaction")(*args, **kwargs)
