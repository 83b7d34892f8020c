"""`upload_deleted` in the outbox: stored first, because later runs know of the upload only by its entry."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from housekeeping import events
from housekeeping.testing.stubs import ManualClock
from tests.faults import at_step
from tests.integration.workers.object_storage.conftest import StaleUploads
from tests.integration.workers.object_storage.places import Folder
from tests.internals.engine import run_sweep
from tests.internals.ledger import OutboxRow
from tests.internals.workers import Claims, outbox_sweep
from tests.internals.workers import uploads_sweep as sweep

pytestmark = pytest.mark.usefixtures("postgres", "pending")


@pytest.fixture
def received() -> Iterator[list[str]]:
    paths: list[str] = []

    def handler(rows: list[dict[str, Any]], *, worker: str, run_id: int | None) -> None:
        paths.extend(row["path"] for row in rows)

    events.on(events.upload_deleted, handler, outbox="quota")
    yield paths
    events.off(events.upload_deleted, handler)


def test_deleted_uploads_are_delivered_by_the_next_sweep_of_the_outbox(
    folder: Folder, stale_uploads: StaleUploads, clock: ManualClock, received: list[str]
) -> None:
    stale_uploads(folder, "may/1", "may/2")

    run_sweep(sweep, clock=clock)
    before = list(received)
    delivered = run_sweep(outbox_sweep)

    assert (before, sorted(received)) == ([], ["may/1", "may/2"])
    assert (delivered.counts["delivered_rows"], OutboxRow.select().count()) == (2, 0)


def test_upload_is_in_the_outbox_before_its_entry_is_removed(
    folder: Folder,
    stale_uploads: StaleUploads,
    clock: ManualClock,
    received: list[str],
) -> None:
    stale_uploads(folder, "may/1")
    stored: list[int] = []

    def die() -> None:
        stored.append(OutboxRow.select().count())
        raise SystemExit("killed")

    with at_step(Claims, "finish", "before", die), pytest.raises(SystemExit):
        run_sweep(sweep, clock=clock)

    assert stored == [1]
    assert run_sweep(outbox_sweep).counts["delivered_rows"] == 1
    assert received == ["may/1"]
