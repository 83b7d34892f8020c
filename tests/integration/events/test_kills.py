"""Events of runs that are killed at every point: none is lost."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from housekeeping.testing.assertions import assert_survives_kill
from housekeeping.testing.points import Ended, run_in_process
from tests.integration.events.conftest import On
from tests.integration.events.orders import NOW, Order, note, noted, orders_expired, sweep
from tests.internals.database import database
from tests.internals.engine import run_sweep
from tests.internals.ledger import NOW as DATABASE_NOW
from tests.internals.ledger import OutboxRow, outbox
from tests.internals.workers import outbox_sweep
from tests.session_settings import NEEDS_SESSION

#: Many processes.
pytestmark = pytest.mark.slow

ALL = list(range(1, 11))


@pytest.fixture
def received(tmp_path: Path, on: On) -> Path:
    """A file to which a handler of the outbox writes each order it is given."""
    file = tmp_path / "received"

    def handler(rows: list[dict[str, Any]], **about: Any) -> None:
        with file.open("a") as stream:
            stream.writelines(f"{row['order_id']}\n" for row in rows)

    on(orders_expired, handler, outbox="file")
    return file


def delivered(file: Path) -> list[int]:
    """Deliver the remaining rows, as any process does later, and return the orders that were received at least once."""
    OutboxRow.update(due_at=DATABASE_NOW - timedelta(seconds=1)).execute()
    assert run_sweep(outbox_sweep).outcome == "done"
    assert OutboxRow.select().count() == 0
    return sorted({int(line) for line in file.read_text().split()}) if file.exists() else []


@NEEDS_SESSION
def test_outbox_delivers_every_row_of_a_killed_run(orders: type[Order], received: Path) -> None:
    def restore() -> None:
        OutboxRow.delete().execute()
        received.unlink(missing_ok=True)

    points = assert_survives_kill(sweep, now=NOW, outside=lambda: delivered(received), restore=restore)

    assert any(str(received) in point for point in points) and delivered(received) == ALL


def killed_at_each_point(received: Path) -> Iterator[tuple[Ended, list[int]]]:
    """Kill the outbox's sweep over ten rows before each of its points, and yield what was received in the end."""
    alive = random.getrandbits(62)
    for number in itertools.count():
        received.unlink(missing_ok=True)
        with database.atomic():
            outbox.store_in_outbox(orders_expired, [{"order_id": n} for n in ALL], worker="w", run_id=1, claimed=False)
        ended = run_in_process(lambda: run_sweep(outbox_sweep).outcome, number, alive)
        # The server has noticed that the process is gone.
        database.execute_sql("SELECT pg_advisory_lock(%s), pg_advisory_unlock(%s)", (alive, alive))
        yield ended, delivered(received)
        if not ended.killed:
            return


@NEEDS_SESSION
def test_outbox_sweep_that_is_killed_loses_no_row(orders: type[Order], received: Path) -> None:
    trials = list(killed_at_each_point(received))

    assert [found for _, found in trials] == [ALL] * len(trials)
    assert any(str(received) in point for point in trials[-1][0].points)


@NEEDS_SESSION
def test_handler_within_the_transaction_wrote_for_the_rows_that_changed(orders: type[Order], on: On) -> None:
    on(orders_expired, note, within_transaction=True)

    # The notices are a table of the application, which is compared with that of an undisturbed run.
    points = assert_survives_kill(sweep, now=NOW, outside=noted)

    assert "INSERT INTO notice (order_id) VALUES (%s)" in points
