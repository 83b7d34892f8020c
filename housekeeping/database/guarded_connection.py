"""Connection that prevents event handlers from ending the batch's transaction."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Self

from psycopg2.extensions import connection as Connection

from housekeeping.core.errors import TransactionEnded


class GuardedConnection(Connection):
    """psycopg2 connection that, while it is lent, executes statements and nothing else.

    The library uses autocommit mode, in which psycopg2 ignores `commit` and `rollback`, but ``with connection:`` still
    commits. While the connection is lent, all three raise TransactionEnded, and so does `close`.
    """

    _lent = False

    @contextmanager
    def lent(self) -> Iterator[None]:
        """Raise TransactionEnded if code within the block tries to end the transaction."""
        self._lent = True
        try:
            yield
        finally:
            self._lent = False

    def commit(self) -> None:
        self._refuse("commit()")
        super().commit()

    def rollback(self) -> None:
        self._refuse("rollback()")
        super().rollback()

    def close(self) -> None:
        self._refuse("close()")
        super().close()

    def set_session(self, *args: Any, **kwargs: Any) -> None:
        self._refuse("set_session()")
        super().set_session(*args, **kwargs)

    def __enter__(self) -> Self:
        self._refuse("with connection:")
        super().__enter__()
        return self

    def _refuse(self, call: str) -> None:
        if self._lent:
            raise TransactionEnded(f"{call} would end the batch's transaction, which the engine ends; leave it open")
