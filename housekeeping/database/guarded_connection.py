"""Connection whose transaction cannot be ended by the code that borrows it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Self

from psycopg2.extensions import connection as Connection

from housekeeping.core.errors import TransactionEnded


class GuardedConnection(Connection):
    """psycopg2 connection that can be lent: its borrower can run statements and nothing else.

    psycopg2 ignores `commit` and `rollback` in autocommit mode, in which the library keeps its connections, and ``with
    connection:`` commits even there. All three are refused, and so is `close`.
    """

    _lent = False

    @contextmanager
    def lent(self) -> Iterator[None]:
        """Refuse to end the transaction within the block."""
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

    def _refuse(self, what: str) -> None:
        if self._lent:
            raise TransactionEnded(f"{what} would end the batch's transaction, which is the engine's; leave it open")
