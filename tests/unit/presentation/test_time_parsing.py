from __future__ import annotations

from datetime import UTC, datetime

import pytest

from tests.internals.core import WrongArgument
from tests.internals.insight import parse_future_time, parse_past_time

NOW = datetime(2026, 11, 20, 12, 0, 30, tzinfo=UTC)


@pytest.mark.parametrize(
    ("text", "moment"),
    [
        ("03:00", "2026-11-20T03:00:00+00:00"),
        ("12:00", "2026-11-20T12:00:00+00:00"),
        ("12:01", "2026-11-19T12:01:00+00:00"),
        ("2026-11-18T04:00", "2026-11-18T04:00:00+00:00"),
        ("2026-11-18 04:00", "2026-11-18T04:00:00+00:00"),
        ("2026-11-18T04:00+02:00", "2026-11-18T02:00:00+00:00"),
    ],
)
def test_past_time_is_parsed(text: str, moment: str) -> None:
    assert parse_past_time(text, NOW).isoformat() == moment


@pytest.mark.parametrize(
    ("text", "moment"),
    [
        ("2h", "2026-11-20T14:00:30+00:00"),
        ("30min", "2026-11-20T12:30:30+00:00"),
        ("90s", "2026-11-20T12:02:00+00:00"),
        ("1 d", "2026-11-21T12:00:30+00:00"),
        ("03:00", "2026-11-21T03:00:00+00:00"),
        ("12:01", "2026-11-20T12:01:00+00:00"),
        ("2026-11-20T12:01", "2026-11-20T12:01:00+00:00"),
    ],
)
def test_future_time_is_parsed(text: str, moment: str) -> None:
    assert parse_future_time(text, NOW).isoformat() == moment


@pytest.mark.parametrize("text", ["25:00", "soon", "", "2026-13-01", "5y", "12:0", "9" * 400 + "d"])
def test_invalid_time_is_rejected_with_an_example(text: str) -> None:
    with pytest.raises(WrongArgument, match="it should be such as"):
        parse_future_time(text, NOW)
    with pytest.raises(WrongArgument, match="it should be such as"):
        parse_past_time(text, NOW)


@pytest.mark.parametrize("text", ["0001-01-01T00:00", "9999-12-31T23:59", "2016-11-20T12:00"])
def test_time_over_ten_years_away_is_rejected(text: str) -> None:
    with pytest.raises(WrongArgument, match="it should be such as"):
        parse_past_time(text, NOW)


@pytest.mark.parametrize("text", ["0s", "2026-11-20T12:00", "2020-01-01T00:00"])
def test_past_end_is_rejected(text: str) -> None:
    with pytest.raises(WrongArgument, match="is past"):
        parse_future_time(text, NOW)
