from __future__ import annotations

from datetime import UTC, datetime
from zoneinfo import ZoneInfo

import pytest

from tests.internals.core import WrongArgument
from tests.internals.insight import parse_future_time, parse_local_time, parse_past_time

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


BERLIN = ZoneInfo("Europe/Berlin")


@pytest.mark.parametrize(
    ("text", "moment"),
    [
        ("03:00", "2026-11-20T02:00:00+00:00"),
        ("13:00", "2026-11-20T12:00:00+00:00"),
        ("13:01", "2026-11-19T12:01:00+00:00"),
        ("2026-07-18T04:00", "2026-07-18T02:00:00+00:00"),
        ("2026-11-18T04:00Z", "2026-11-18T04:00:00+00:00"),
        ("2026-10-25T02:30+01:00", "2026-10-25T01:30:00+00:00"),
    ],
)
def test_time_without_an_offset_is_of_the_zone(text: str, moment: str) -> None:
    time, note = parse_local_time(text, NOW, BERLIN)

    assert (time.isoformat(), note) == (moment, None)


@pytest.mark.parametrize("text", ["2026-10-25T02:00", "2026-10-25T02:30", "2026-10-25T02:59"])
def test_repeated_time_is_the_first_one_and_names_the_second(text: str) -> None:
    time, note = parse_local_time(text, NOW, BERLIN)

    assert time.astimezone(BERLIN).isoformat(timespec="minutes") == f"{text}+02:00"
    assert note is not None and note.endswith(f"twice; this is the first one, the second is {text}+01:00")


@pytest.mark.parametrize("text", ["2026-03-29T02:00", "2026-03-29T02:30", "2026-03-29T02:59"])
def test_skipped_time_is_the_end_of_the_gap(text: str) -> None:
    time, note = parse_local_time(text, NOW, BERLIN)

    assert time.isoformat() == "2026-03-29T01:00:00+00:00"
    assert note is not None and note.startswith(f"Europe/Berlin skipped {text[-5:]} on 2026-03-29")
    assert note.endswith("set forward to 03:00, which is meant here")


@pytest.mark.parametrize("text", ["2026-03-29T01:59", "2026-03-29T03:00", "2026-10-25T01:59", "2026-10-25T03:00"])
def test_time_beside_a_change_of_the_clocks_is_plain(text: str) -> None:
    assert parse_local_time(text, NOW, BERLIN)[1] is None


def test_day_that_a_zone_skipped_ends_at_its_midnight() -> None:
    now = datetime(2012, 1, 3, tzinfo=UTC)

    time, _ = parse_local_time("2011-12-30T12:00", now, ZoneInfo("Pacific/Apia"))

    assert time.astimezone(ZoneInfo("Pacific/Apia")).isoformat() == "2011-12-31T00:00:00+14:00"
