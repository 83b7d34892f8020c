"""Search, order and hidden numbers of the table of workers."""

from __future__ import annotations

import dataclasses
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from tests.internals.insight import Alert, WorkerStatus
from tests.internals.ledger import Acknowledged, Override, RunRecord
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
        ("", "carts.empty", "mail.bounced"),
        ("wrong", "carts.empty", "mail.bounced"),
        ("name", "carts.empty", "mail.old"),
        ("backlog", "carts.expired", "mail.bounced"),
        ("oldest", "carts.expired", "mail.bounced"),
        ("last_run", "carts.expired", "mail.bounced"),
    ],
)
def test_workers_are_sorted_and_unknown_values_come_last(sort: str, first: str, last: str) -> None:
    found = names({"sort": sort})

    assert (found[0], found[-1], len(found)) == (first, last, 4)


def test_search_says_how_many_it_does_not_find() -> None:
    table = WorkerTable.of(WORKERS, {"q": " CARTS "})

    assert [status.worker for status in table.workers] == ["carts.empty", "carts.expired"]
    assert (table.total, table.unmatched) == (4, 2)


def acknowledged(alert: Alert) -> Alert:
    return dataclasses.replace(alert, acknowledged=Acknowledged("kim", NOW))


TROUBLED = [
    worker("critical", alarms=[Alert("failed_rows", "3"), Alert("stuck", "hangs")]),
    worker("warning", alarms=[Alert("failed_rows", "3")]),
    worker("failed", last_run=run("failed")),
    worker("lost", last_run=run("lost")),
    worker("silent", last_run=run(None, silent_s=600)),
    worker("known", alarms=[acknowledged(Alert("stuck", "hangs"))]),
    worker("paused", switch=Override("w", "paused")),
    worker("narrow", switch=Override("w", "narrow", batch_size=1)),
]


@pytest.mark.parametrize(("healthy", "folded"), [(10, 0), (11, 11)])
def test_worst_worker_comes_first_and_many_healthy_ones_are_folded(healthy: int, folded: int) -> None:
    fine = [worker(f"fine-{number}", last_run=run(None, silent_s=3)) for number in range(healthy)]

    table = WorkerTable.of([*fine, *reversed(TROUBLED)], {})

    first = [status.worker for status in table.workers[: len(TROUBLED)]]
    assert first[:2] == ["critical", "warning"] and set(first[2:5]) == {"failed", "lost", "silent"}
    assert set(first[5:]) == {"known", "paused", "narrow"}
    assert (len(table.folded), table.total) == (folded, healthy + len(TROUBLED))


@pytest.mark.parametrize(("troubled", "query"), [([], {}), (TROUBLED, {"sort": "name"})])
def test_nothing_is_folded_without_a_problem_or_in_another_order(
    troubled: list[WorkerStatus], query: dict[str, str]
) -> None:
    fine = [worker(f"fine-{number}") for number in range(11)]

    table = WorkerTable.of([*fine, *troubled], query)

    assert (len(table.workers), table.folded) == (table.total, [])


def test_worker_that_is_not_set_up_is_neither_shown_nor_counted() -> None:
    table = WorkerTable.of([*WORKERS, worker("x", problem=SetupProblem("x", "no table"))], {})

    assert (table.total, len(table.workers)) == (4, 4)
