"""The engine: what a run tells in alarms, log lines and events, and to the ledger when it is paused."""

from __future__ import annotations

from typing import Any

import pytest

from housekeeping import events
from housekeeping.testing.stubs import ManualClock
from housekeeping.workers.user_status_cleanup.models import UserStatus
from tests.integration.conftest import AddStatuses
from tests.integration.sweeps.engine.executed import DUE, SMALL
from tests.internals.database import database
from tests.internals.engine import run_sweep
from tests.internals.workers import status_sweep as sweep


def alarms(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [getattr(record, "alarm", "") for record in caplog.records if record.message == "Alert"]


def test_run_over_its_longest_time_raises_an_alert(add_statuses: AddStatuses, caplog: pytest.LogCaptureFixture) -> None:
    clock = ManualClock(tick=sweep.limits.runtime * 3)
    add_statuses(1, "timestamptz '2025-01-01 00:00:00+00'")

    run_sweep(sweep, clock=clock)

    assert alarms(caplog) == ["longest_run"]


def test_run_logs_one_line_at_its_start_and_one_at_its_end(
    add_statuses: AddStatuses, caplog: pytest.LogCaptureFixture
) -> None:
    add_statuses(25, DUE)

    with caplog.at_level("INFO"):
        result = run_sweep(SMALL)

    started, ended = (record for record in caplog.records if record.message in ("Run started", "Run ended"))
    assert (started.message, vars(started)["run_id"], vars(started)["worker"]) == (
        "Run started",
        result.run_id,
        "user_status_cleanup.batch",
    )
    fields = ("outcome", "deleted_rows", "batches", "out_of_time", "run_id")
    assert [vars(ended)[name] for name in fields] == ["done", 25, 3, False, result.run_id]


def test_subscriber_that_raises_after_the_commit_harms_nothing(
    add_statuses: AddStatuses, reported: list[dict[str, Any]]
) -> None:
    add_statuses(25, DUE)
    heard: list[tuple[int, int]] = []

    def fail(sender: str, **event: Any) -> None:
        raise OSError("the mail server is away")

    def listen(sender: str, *, rows: list[dict[str, Any]], worker: str, run_id: int) -> None:
        assert not database.in_transaction()
        heard.append(
            (len(rows), UserStatus.select().where(UserStatus.user_id.in_([r["user_id"] for r in rows])).count())
        )

    with events.user_status_cleared.connected_to(fail), events.user_status_cleared.connected_to(listen):
        result = run_sweep(SMALL)

    assert result.outcome == "done"
    assert heard == [(10, 0), (10, 0), (5, 0)]
    assert {str(about["error"]) for about in reported} == {"the mail server is away"}
