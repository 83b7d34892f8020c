from __future__ import annotations

from datetime import UTC, datetime

import pendulum
import pytest

from tests.internals.core import Cron

SATURDAY = datetime(2026, 11, 21, 9, 30, 20, tzinfo=UTC)


@pytest.mark.parametrize("answer", [True, False])
def test_due_decides_for_validate(answer: bool) -> None:
    asked: list[datetime] = []
    schedule = Cron("0 0 1 1 *")

    def ask(now: datetime) -> bool:
        asked.append(now)
        return answer

    schedule.due = ask

    assert schedule.validate(pendulum.instance(SATURDAY).in_timezone("Asia/Tokyo")) is answer
    assert asked == [SATURDAY]
    assert type(asked[0]) is datetime
    assert asked[0].tzinfo is UTC


@pytest.mark.parametrize("second", [0, 1, 59])
def test_scheduler_wakes_at_each_whole_minute_for_any_schedule(second: int) -> None:
    now = pendulum.datetime(2026, 3, 29, 1, 59, second, 500_000, tz="Europe/Berlin")

    wake_up = Cron("0 0 29 2 *").next_valid_date(now)

    assert wake_up == datetime(2026, 3, 29, 1, 0, tzinfo=UTC)
    assert isinstance(wake_up, pendulum.DateTime)
