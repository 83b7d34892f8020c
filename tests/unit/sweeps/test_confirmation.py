from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from housekeeping.core.errors import PlanRefused
from housekeeping.sweeps.limits.confirmation import confirmed, plan_id
from housekeeping.sweeps.stages.stage import Backlog

AT = datetime(2026, 11, 20, 3, 0, tzinfo=UTC)
ID = plan_id("w", None, Backlog(100), AT)


def test_a_plan_id_is_a_word_that_can_be_typed_and_read_back() -> None:
    assert (len(ID), ID.isalnum(), ID.islower()) == (24, True, True)

    read = confirmed(f" {ID.upper()} ", "w", None, AT)

    assert (read.plan_id, read.rows, read.exact, read.most) == (ID, 100, True, 110)


@pytest.mark.parametrize(
    ("rows", "exact", "most"), [(0, True, 0), (9, True, 9), (10, True, 11), (10**12, True, None), (5, False, None)]
)
def test_a_tenth_more_is_confirmed_with_it_or_all_there_are_where_nobody_counted_them(
    rows: int, exact: bool, most: int | None
) -> None:
    assert confirmed(plan_id("w", 7, Backlog(rows, exact), AT), "w", 7, AT).most == most


@pytest.mark.parametrize(
    ("given", "worker", "argument", "later", "said"),
    [
        ("", "w", None, 0, "is no plan id"),
        ("yes", "w", None, 0, "is no plan id"),
        ("ü" * 24, "w", None, 0, "is no plan id"),
        (ID[:16], "w", None, 0, "is no plan id"),
        (ID[:-1] + ("a" if ID[-1] != "a" else "b"), "w", None, 0, "is no plan id, or was mistyped"),
        (("a" if ID[8] != "a" else "b").join((ID[:8], ID[9:])), "w", None, 0, "is no plan id, or was mistyped"),
        (ID, "v", None, 0, "is not of v; make one by: housekeeping plan v"),
        (ID, "w", 7, 0, "is not of w 7; make one by: housekeeping plan w 7"),
        (ID, "w", None, 3601, "is over an hour old (60 min)"),
        (ID, "w", None, -301, "was made in the future, by the database's clock"),
    ],
)
def test_a_wrong_an_old_and_a_foreign_id_are_refused_in_one_line(
    given: str, worker: str, argument: int | None, later: int, said: str
) -> None:
    with pytest.raises(PlanRefused) as refused:
        confirmed(given, worker, argument, AT + timedelta(seconds=later))

    assert said in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize("later", [-300, 0, 3600])
def test_an_id_is_good_for_an_hour_and_a_clock_that_is_a_little_behind(later: int) -> None:
    assert confirmed(ID, "w", None, AT + timedelta(seconds=later)).rows == 100
