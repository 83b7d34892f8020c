"""Database handle of the library on the simulated `Postgres`."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, TypeVar

from peewee import OperationalError
from psycopg2.extensions import TRANSACTION_STATUS_IDLE, TRANSACTION_STATUS_INTRANS
from psycopg2.extras import Json

from tests.internals.database import CompiledQuery, Database, PreparedQuery
from tests.simulator.postgres import Postgres, Transaction
from tests.simulator.queries import Cursor, Unknown, execute

T = TypeVar("T")


class SimulatedDatabase(Database):
    """Database that runs the library's real models and transactions on a `Postgres`.

    Parameters:
      postgres: Asked for at each statement, because every schedule has a new one.
    """

    def __init__(self, postgres: Callable[[], Postgres]) -> None:
        super().__init__("simulated")
        self.postgres = postgres

    def begin(self, *args: Any, **kwargs: Any) -> None:
        try:
            self.postgres().begin()
        except OperationalError:
            self.postgres().begin()  # on a new connection, like the real handle

    def commit(self) -> None:
        self.postgres().commit()

    def rollback(self) -> None:
        self.postgres().rollback()

    def is_closed(self) -> bool:
        return not hasattr(self, "postgres") or not self.postgres().in_transaction()

    def connect(self, reuse_if_open: bool = False) -> bool:
        return True

    def close(self) -> bool:
        self.postgres().rollback()
        return True

    def connection(self) -> Any:
        status = TRANSACTION_STATUS_INTRANS if self.postgres().in_transaction() else TRANSACTION_STATUS_IDLE
        return SimpleNamespace(info=SimpleNamespace(transaction_status=status))

    def execute(self, query: Any, **context: Any) -> Any:
        """Run a query. An unknown one ends the whole schedule."""
        try:
            return self._execute_known(query)
        except Unknown as unknown:
            self.postgres().world.failure = unknown
            raise

    def rows(self, statement: CompiledQuery, *values: Any) -> list[tuple[Any, ...]]:
        """Run a compiled query from its peewee query."""
        plain = tuple(value.adapted if isinstance(value, Json) else value for value in values)
        try:
            return list(self._execute_known(statement.query, plain).rows)
        except Unknown as unknown:
            self.postgres().world.failure = unknown
            raise

    def rows_at_once(self, statement: PreparedQuery, *values: Any) -> list[tuple[Any, ...]]:
        """Run compiled queries in one transaction; return the rows of the last one."""
        postgres = self.postgres()

        def effect(transaction: Transaction) -> list[tuple[Any, ...]]:
            return [execute(postgres, transaction, each, values).rows for each in statement.queries][-1]

        try:
            return postgres.alone("queries at once", effect)
        except Unknown as unknown:
            postgres.world.failure = unknown
            raise

    def _execute_known(self, query: Any, values: tuple[Any, ...] = ()) -> Any:
        postgres = self.postgres()
        name = type(query).__name__.removeprefix("Model").upper()
        if hasattr(query, "model"):
            name = f"{name} {query.model._meta.table_name}"
        return self._done(name, lambda transaction: execute(postgres, transaction, query, values), "SELECT" in name)

    def execute_sql(self, sql: str, params: Any = None) -> Any:
        return self._done(sql[:60], lambda transaction: self._known(transaction, sql, params), sql.startswith("SELECT"))

    def _done(self, name: str, effect: Callable[[Transaction], T], reads: bool) -> T:
        postgres = self.postgres()
        if postgres.in_transaction():
            return effect(postgres.statement(name))
        try:
            return postgres.alone(name, effect)
        except OperationalError:
            if not reads:
                raise
            return postgres.alone(name, effect)  # on a new connection, like the real handle

    def _known(self, transaction: Transaction, sql: str, params: Any) -> Cursor:
        """Run one of the few hand-written statements."""
        if sql.startswith(("SAVEPOINT", "RELEASE SAVEPOINT", "ROLLBACK TO SAVEPOINT")):
            return Cursor([])  # the library never continues after an error in a savepoint
        raise Unknown(sql)
