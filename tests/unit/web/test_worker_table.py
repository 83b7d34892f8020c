"""Search, order and hidden numbers of the table of workers."""

from __future__ import annotations

import dataclasses
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from tests.internals.insight import Alert, WorkerStatus
from tests.internals.ledger import Override, RunRecord
from tests.internals.sweeps import Backlog, SetupProblem
from tests.internals.web import WorkerTable

NOW = datetime(2026, 11, 23, 12, tzinfo=UTC)


def run(outcome: str | None, *, ago_s: int = 0, silent_s: float | None = None) -> RunRecord:
    values: dict[str, Any] = dict.fromkeys(field.name for field in dataclasses.fields(RunRecord))
    started_at = NOW - timedelta(seconds=ago_s)
    return RunRecord(**values | {"outcome": outcome, "started_at": started_at, "lost": (silent_s or 0) > 60})


def worker(name: str, **given: Any) -> WorkerStatus:
    values: dict[str, Any] = {"state": "on", "switch": None, "schedule": None, "last_run": None, "last_success": None}
    return WorkerStatus(name, **{**values, **given})


WORKERS = [
    worker("mail.old", waiting=Backlog(5), oldest=NOW, last_run=run("done", ago_s=60)),
    worker("carts.expired", waiting=Backlog(70), oldest=NOW - timedelta(days=2), last_run=run("done", ago_s=5)),
    worker("mail.bounced", waiting=None, oldest=17, last_run=None),
    worker("carts.empty", waiting=Backlog(6), oldest=NOW - timedelta(days=1), last_run=run("failed", ago_s=90)),
]


def names(query: dict[str, str], workers: list[WorkerStatus] = WORKERS) -> list[str]:
    return [status.worker for status in WorkerTable.of(workers, query).workers]


@pytest.mark.parametrize(
    ("sort", "first", "last"),
    [
        ("", "mail.old", "carts.empty"),
        ("wrong", "mail.old", "carts.empty"),
        ("name", "carts.empty", "mail.old"),
        ("backlog", "carts.expired", "mail.bounced"),
        ("oldest", "carts.expired", "mail.bounced"),
        ("last_run", "carts.expired", "mail.bounced"),
    ],
)
def test_workers_are_sorted_and_unknown_values_come_last(sort: str, first: str, last: str) -> None:
    found = names({"sort": sort})

    assert (found[0], found[-1], len(found)) == (first, last, 4)


def test_search_and_problems_only_say_how_many_they_hide() -> None:
    table = WorkerTable.of(WORKERS, {"q": " CARTS ", "problems": "1"})

    assert [status.worker for status in table.workers] == ["carts.empty"]
    assert (table.total, table.unmatched, table.without_problem) == (4, 2, 1)


@pytest.mark.parametrize(
    "given",
    [
        {"alarms": [Alert("backlog", "too many")]},
        {"last_run": run("failed")},
        {"last_run": run("lost")},
        {"last_run": run(None, silent_s=600)},
        {"switch": Override("w", "paused")},
        {"switch": Override("w", "narrow", batch_size=1)},
    ],
)
def test_problems_only_keeps_workers_at_which_a_person_should_look(given: dict[str, Any]) -> None:
    fine = [worker("a"), worker("b", last_run=run("done")), worker("c", last_run=run(None, silent_s=3))]

    assert names({"problems": "1"}, [*fine, worker("w", **given)]) == ["w"]


def test_worker_that_is_not_set_up_is_neither_shown_nor_counted() -> None:
    table = WorkerTable.of([*WORKERS, worker("x", problem=SetupProblem("x", "no table"))], {})

    assert (table.total, len(table.workers)) == (4, 4)
