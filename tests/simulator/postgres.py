"""In-memory tables with PostgreSQL's rules: READ COMMITTED, row locks, waits, lost commits.

What a transaction writes is seen by others once it has committed. A row that another has locked is waited for, and
read again afterwards; a circle of waits ends with an error for one of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final, Literal, TypeVar

from peewee import OperationalError

from tests.simulator.world import Task, World

T = TypeVar("T")

Row = dict[str, Any]
Parameter = tuple[str, Any]  # table and key
Mode = Literal["share", "update"]

#: Timeouts of the library's sessions (housekeeping/database/connection.py).
LOCK_TIMEOUT_S: Final = 10.0
IDLE_IN_TRANSACTION_S: Final = 60.0


class Deadlock(OperationalError):
    """Error of the transaction that PostgreSQL chose as a deadlock victim."""

    class orig:
        pgcode = "40P01"


@dataclass(eq=False)
class Transaction:
    """Uncommitted changes of a connection."""

    task: Task | None
    written: dict[Parameter, Row | None] = field(default_factory=dict)
    locks: set[Parameter] = field(default_factory=set)
    open: bool = True
    waits_for: Parameter | None = None
    spoke_at: float = 0.0
    notes: list[tuple[Any, ...]] = field(default_factory=list)  # recorded at the commit


class Postgres:
    """Simulated database server."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.committed: dict[str, dict[Any, Row]] = {}
        self.clock_offset = 0.0
        self._locks: dict[Parameter, dict[Transaction, Mode]] = {}
        self._waiting: dict[Parameter, list[Task]] = {}
        self._open: dict[Task | None, Transaction] = {}
        self._numbers: dict[str, int] = {}

    def now(self) -> float:
        """``clock_timestamp()``."""
        return self.world.now + self.clock_offset

    def number(self, sequence: str) -> int:
        """Return the next number of a sequence. It is never returned."""
        self._numbers[sequence] = self._numbers.get(sequence, 0) + 1
        return self._numbers[sequence]

    def begin(self) -> None:
        """``BEGIN``.

        Raises:
          OperationalError: When the connection is lost.
        """
        task = self.world.current
        self.world.io("postgres", "BEGIN", lambda: self._begin(task))

    def commit(self) -> None:
        """``COMMIT``.

        Raises:
          OperationalError: When the connection is lost; whether it took effect is then unknown.
        """
        transaction = self._open[self.world.current]
        self.world.io("postgres", "COMMIT", lambda: self._commit(transaction))

    def rollback(self) -> None:
        """Run ``ROLLBACK``. A lost connection is already rolled back."""
        transaction = self._open.get(self.world.current)
        if transaction is not None:
            self._end(transaction)

    def in_transaction(self) -> bool:
        """Return whether the running task has an open transaction."""
        return self.world.current in self._open

    def statement(self, name: str) -> Transaction:
        """Send a statement of the current transaction to the server.

        Raises:
          OperationalError: When the connection is lost, and the transaction with it.
        """
        transaction = self._open[self.world.current]

        def reach() -> None:
            if not transaction.open:
                raise OperationalError("terminating connection")
            transaction.spoke_at = self.world.now

        try:
            self.world.io("postgres", name, reach)
        except OperationalError:
            self._end(transaction)
            raise
        return transaction

    def alone(self, name: str, effect: Callable[[Transaction], T]) -> T:
        """Run a statement in its own transaction."""
        task = self.world.current

        def do() -> T:
            there = self._open.get(task)
            if there is not None and there.open:
                return effect(there)  # left open by an interrupted COMMIT
            transaction = self._begin(task)
            try:
                done = effect(transaction)
            except BaseException:
                self._end(transaction)
                raise
            self._commit(transaction)
            return done

        return self.world.io("postgres", name, do)

    def rows(self, table: str, transaction: Transaction | None = None) -> Iterator[tuple[Any, Row]]:
        """Yield the rows visible to a statement: committed ones and those of its transaction."""
        mine = transaction.written if transaction is not None else {}
        there = self.committed.get(table, {})
        for key in [*there, *(key for name, key in mine if name == table and key not in there)]:
            row = self.row(table, key, transaction)
            if row is not None:
                yield key, row

    def row(self, table: str, key: Any, transaction: Transaction | None = None) -> Row | None:
        """Return a row as visible to a statement."""
        if transaction is not None and (table, key) in transaction.written:
            return transaction.written[table, key]
        return self.committed.get(table, {}).get(key)

    def update(
        self,
        transaction: Transaction,
        table: str,
        key: Any,
        where: Callable[[Row], bool],
        values: Callable[[Row], Row],
    ) -> Row | None:
        """Lock a row, check it again after a wait, and change it. Return the new row."""
        self.lock(transaction, (table, key), "update")
        row = self.row(table, key, transaction)
        if row is None or not where(row):
            return None
        changed = {**row, **values(row)}
        transaction.written[table, key] = changed
        return changed

    def insert(self, transaction: Transaction, table: str, key: Any, row: Row) -> Row:
        """Insert or replace a row and lock it."""
        transaction.written[table, key] = row
        return row

    def try_lock(self, transaction: Transaction, place: Parameter) -> bool:
        """Try to lock a row like ``FOR UPDATE SKIP LOCKED``. Return whether it is locked."""
        if self._in_the_way(transaction, place, "update"):
            return False
        self._take(transaction, place, "update")
        return True

    def lock(self, transaction: Transaction, place: Parameter, mode: Mode) -> None:
        """Lock a row and wait for its holder.

        Raises:
          Deadlock: When the others wait for this one.
          OperationalError: After the lock timeout, or when the connection was ended meanwhile.
        """
        deadline = self.world.now + LOCK_TIMEOUT_S
        while self._in_the_way(transaction, place, mode):
            transaction.waits_for = place
            if self._circle(transaction, transaction, set()):
                self._end(transaction)
                raise Deadlock("deadlock detected")
            task = self.world.current
            assert task is not None, f"{place} is locked, and nobody else can run"
            self._waiting.setdefault(place, []).append(task)
            woken = self.world.block(max(deadline - self.world.now, 0))
            self._waiting[place] = [each for each in self._waiting[place] if each is not task]
            if not transaction.open or not woken:
                self._end(transaction)
                raise OperationalError("canceling statement due to lock timeout")
        transaction.waits_for = None
        self._take(transaction, place, mode)

    def close(self, tasks: list[Task]) -> None:
        """Close the connections of these tasks and roll back their transactions."""
        for task in tasks:
            transaction = self._open.get(task)
            if transaction is not None:
                self._release(transaction)

    def end_idle(self, task: Task, idle_s: float) -> None:
        """End an idle transaction after its timeout."""
        transaction = self._open.get(task)
        if transaction is not None and idle_s > IDLE_IN_TRANSACTION_S:
            self._release(transaction)

    def _begin(self, task: Task | None) -> Transaction:
        there = self._open.get(task)
        if there is not None and there.open:
            return there  # PostgreSQL only warns of a nested BEGIN
        transaction = self._open[task] = Transaction(task, spoke_at=self.world.now)
        return transaction

    def _commit(self, transaction: Transaction) -> None:
        if not transaction.open:
            self._end(transaction)
            raise OperationalError("terminating connection due to idle-in-transaction timeout")
        for note in transaction.notes:
            self.world.note(*note)
        for (table, key), row in transaction.written.items():
            self._tell(table, key, self.committed.get(table, {}).get(key), row)
            if row is None:
                self.committed.get(table, {}).pop(key, None)
            else:
                self.committed.setdefault(table, {})[key] = row
        self._end(transaction)

    def _tell(self, table: str, key: Any, before: Row | None, row: Row | None) -> None:
        """Record a change of the ledger."""
        note = self.world.note
        if table == "leases" and row is not None and (before is None or before["holder"] != row["holder"]):
            note("epoch taken", key, row["epoch"], row["holder"])
        if table != "runs" or row is None:
            return
        if before is None and row["outcome"] is None:
            note("run began", row["worker"], key, row["message_id"], row["epoch"], row["cursor"])
        elif before is None:
            note("recorded", row["worker"], key, row["message_id"], row["tick"], row["outcome"], row["reason"])
        elif _work(before) != _work(row) or (before["outcome"], row["outcome"]) == (None, "done"):
            note("committed by", row["worker"], key, row["epoch"], row["cursor"])
        if before is not None and before["outcome"] is None and row["outcome"] is not None:
            note("run ended", row["worker"], key, row["message_id"], row["outcome"], row["reason"])

    def _end(self, transaction: Transaction) -> None:
        self._release(transaction)
        if self._open.get(transaction.task) is transaction:
            del self._open[transaction.task]

    def _release(self, transaction: Transaction) -> None:
        transaction.open = False
        for place in transaction.locks:
            self._locks[place].pop(transaction, None)
            for task in self._waiting.get(place, ()):
                self.world.wake(task)
        transaction.locks = set()

    def _take(self, transaction: Transaction, place: Parameter, mode: Mode) -> None:
        if not transaction.open:
            return  # the server ended it before its task got the answer
        held = self._locks.setdefault(place, {})
        if held.get(transaction) != "update":
            held[transaction] = mode
        transaction.locks.add(place)

    def _in_the_way(self, transaction: Transaction, place: Parameter, mode: Mode) -> list[Transaction]:
        held = self._locks.get(place, {})
        return [each for each, theirs in held.items() if each is not transaction and "update" in (mode, theirs)]

    def _circle(self, start: Transaction, at: Transaction, seen: set[Parameter]) -> bool:
        if at.waits_for is None or at.waits_for in seen:
            return False
        seen.add(at.waits_for)
        others = [each for each in self._locks.get(at.waits_for, {}) if each is not at]
        return start in others or any(self._circle(start, each, seen) for each in others)


def _work(run: Row) -> tuple[Any, ...]:
    """Return the cursor and the numbers of records. A run also notes other things when its row is closed."""
    return run["cursor"], {name: count for name, count in run["counts"].items() if isinstance(count, int)}
