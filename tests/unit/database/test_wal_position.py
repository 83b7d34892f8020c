from __future__ import annotations

import pytest

from tests.internals.database import WalPosition, WalPositionReader

SYSTEM = "7710685625728962769"


@pytest.mark.parametrize(
    "later",
    [
        WalPosition(SYSTEM, 1, 0x10),
        WalPosition(SYSTEM, 1, 0x3_0000_0088),
        WalPosition(SYSTEM, 2, 0),
        WalPosition(SYSTEM, 16, 0),
    ],
)
def test_the_later_position_is_the_greater_one_as_text_too(later: WalPosition) -> None:
    earlier = WalPosition(SYSTEM, 1, 0x9)

    assert earlier < later
    assert str(earlier) < str(later)


def test_a_position_is_read_back_from_its_text() -> None:
    position = WalPosition(SYSTEM, 10, 0x3_0000_0088)

    assert WalPosition.parse(str(position)) == position
    assert position.as_lsn == "3/88"


@pytest.mark.parametrize("text", ["", None, "7/x/1", "0/3000088", f"{SYSTEM}/1", f"{SYSTEM}/1/2/3"])
def test_parse_of_another_text_returns_none(text: object) -> None:
    assert WalPosition.parse(text) is None


def test_without_a_database_there_is_no_position() -> None:
    assert WalPositionReader(None).current() is None
