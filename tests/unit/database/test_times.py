"""Times that are in UTC without saying so."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta, timezone

import pytest
from peewee import Model

from tests.internals.core import limit_ms
from tests.internals.database import NaiveUtcDateTimeField


class Event(Model):
    at = NaiveUtcDateTimeField(null=True)


@pytest.fixture(autouse=True)
def process_in_tokyo(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


def test_a_time_of_any_zone_is_written_in_utc_without_its_zone() -> None:
    nine_in_tokyo = datetime(2026, 1, 1, 9, tzinfo=timezone(timedelta(hours=9)))

    assert Event.at.db_value(nine_in_tokyo) == datetime(2026, 1, 1)  # noqa: DTZ001


def test_time_is_read_as_utc_in_any_zone_of_the_process() -> None:
    read = Event.at.python_value(datetime(2026, 1, 1))  # noqa: DTZ001

    assert (read, read.utcoffset()) == (datetime(2026, 1, 1, tzinfo=UTC), timedelta())


def test_a_time_without_a_zone_is_refused() -> None:
    with pytest.raises(ValueError, match="at: .* has no timezone"):
        Event.at.db_value(datetime(2026, 1, 1))  # noqa: DTZ001


def test_null_stays_null() -> None:
    assert (Event.at.db_value(None), Event.at.python_value(None)) == (None, None)


@pytest.mark.parametrize(
    ("limit", "sent"), [(timedelta(), 1), (timedelta(microseconds=400), 1), (timedelta(seconds=2), 2000)]
)
def test_short_time_limit_is_not_sent_as_none(limit: timedelta, sent: int) -> None:
    assert limit_ms(limit) == sent
