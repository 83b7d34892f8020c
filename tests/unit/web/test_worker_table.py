"""Search, order, groups and hidden numbers of the table of workers."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from housekeeping.sweeps.insight.alerts import Alert
from housekeeping.sweeps.insight.status import WorkerStatus
from housekeeping.sweeps.ledger.overrides import Override
from housekeeping.sweeps.setup_problem import SetupProblem
from housekeeping.sweeps.stages.stage import Backlog
from housekeeping.web.pages.worker_table import SORTS, Choices, WorkerTable

NOW = datetime(2026, 11, 23, 12, tzinfo=UTC)


def run(outcome: str | None, *, ago_s: int = 0, silent_s: float | None = None) -> dict[str, Any]:
    started_at = (NOW - timedelta(seconds=ago_s)).isoformat()
    return {"outcome": outcome, "started_at": started_at, "heartbeat_age_s": silent_s}


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
    table = WorkerTable.of(workers, Choices.of(query))
    return [status.worker for group in table.groups for status in group.workers]


@pytest.mark.parametrize(
    ("sort", "first", "last"),
    [
        ("", "mail.old", "carts.empty"),
        ("wrong", "mail.old", "carts.empty"),
        ("name", "carts.empty", "mail.old"),
        ("-name", "mail.old", "carts.empty"),
        ("backlog", "carts.expired", "mail.bounced"),
        ("-backlog", "mail.old", "mail.bounced"),
        ("oldest", "carts.expired", "mail.bounced"),
        ("last_run", "carts.expired", "mail.bounced"),
    ],
)
def test_workers_are_sorted_and_unknown_values_come_last(sort: str, first: str, last: str) -> None:
    found = names({"sort": sort})

    assert (found[0], found[-1], len(found)) == (first, last, 4)


@pytest.mark.parametrize("column", [column for column in SORTS if column])
def test_second_click_on_a_heading_reverses_the_order(column: str) -> None:
    once = Choices.of(Choices.of({"q": "mail"}).sorted_by(column))
    twice = Choices.of(once.sorted_by(column))

    assert {once.direction(column), twice.direction(column)} == {"ascending", "descending"}
    assert once.search == twice.search == "mail" and twice.sorted_by(column) == once.query()


def test_search_and_problems_only_say_how_many_they_hide() -> None:
    table = WorkerTable.of(WORKERS, Choices.of({"q": " CARTS ", "problems": "1"}))

    assert [status.worker for group in table.groups for status in group.workers] == ["carts.empty"]
    assert (table.shown, table.total, table.unmatched, table.without_problem) == (1, 4, 2, 1)


def test_workers_are_grouped_by_the_first_part_of_their_name() -> None:
    workers = [*WORKERS, worker("mail.lists.old")]

    table = WorkerTable.of(workers, Choices.of({"group": "family", "sort": "-backlog"}))

    found = [(group.family, [each.worker for each in group.workers], group.problems) for group in table.groups]
    assert found == [
        ("carts", ["carts.empty", "carts.expired"], 1),
        ("mail", ["mail.old", "mail.bounced", "mail.lists.old"], 0),
    ]


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
    table = WorkerTable.of([*WORKERS, worker("x", problem=SetupProblem("x", "no table"))], Choices())

    assert (table.total, table.shown) == (4, 4)


def test_choices_come_back_from_their_own_query() -> None:
    chosen = Choices("mail", "-backlog", grouped=True, problems=True)

    assert Choices.of(chosen.query()) == chosen
    assert Choices().query() == {}
