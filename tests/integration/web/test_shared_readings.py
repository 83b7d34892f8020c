"""Costs of open pages for the database: the same for many readers as for one."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, Final

import pytest
from flask import Flask
from psycopg2.extensions import TRANSACTION_STATUS_IDLE
from psycopg2.extensions import cursor as Cursor

from tests.integration.web.conftest import WORKER
from tests.internals.core import SystemClock
from tests.internals.database import Database, close_databases
from tests.internals.ledger import NOW, Run
from tests.internals.web import snapshot

READERS: Final = 24
#: Transactions for each reading, which is shared for two seconds.
MOST: Final = 2 * 10


class CountedTransactions(Cursor):
    """psycopg cursor that counts the transactions that begin with its statements."""

    begun: Final[list[str]] = []

    def execute(self, query: Any, vars: Any = None) -> None:
        connection: Any = self.connection
        if connection.get_transaction_status() == TRANSACTION_STATUS_IDLE:
            self.begun.append(str(query))
        super().execute(query, vars)


@pytest.fixture
def later(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Makes everything that was read too old to be shown. Meanwhile no time passes."""
    now = [1_000.0]
    monkeypatch.setattr(SystemClock, "monotonic", lambda self: now[0])
    monkeypatch.setattr(snapshot, "time", SimpleNamespace(monotonic=lambda: now[0]))

    def pass_minutes() -> None:
        now[0] += 600

    return pass_minutes


@pytest.mark.parametrize("page", ["/", f"/workers/{WORKER}", "/runs", "/runs/{run}", "/processes", "/charts"])
def test_page_costs_the_same_however_many_look(
    make_app: Callable[[bool], Flask], postgres: Database, later: Callable[[], None], page: str
) -> None:
    ran = {"started_at": NOW, "heartbeat_at": NOW, "trigger": "schedule"}
    run = Run.insert(worker=WORKER, **ran).execute()
    postgres.close()
    postgres.connect_params["cursor_factory"] = CountedTransactions
    app = make_app(True)

    def look(_: int) -> int:
        try:
            return app.test_client().get(page.format(run=run)).status_code
        finally:
            close_databases()

    def costs(readers: int) -> int:
        later()
        before = len(CountedTransactions.begun)
        with ThreadPoolExecutor(8) as pool:
            assert set(pool.map(look, range(readers))) == {200}
        return len(CountedTransactions.begun) - before

    costs(1)  # reads the catalog
    one, many = costs(1), costs(READERS)

    assert 0 < many == one <= MOST
