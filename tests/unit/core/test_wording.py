from __future__ import annotations

import pytest

from tests.internals.core import counted, format_duration


@pytest.mark.parametrize(
    ("number", "text"), [(0, "0 errors"), (1, "1 error"), (2, "2 errors"), (1_234, "1,234 errors")]
)
def test_one_is_singular_and_all_else_is_plural(number: int, text: str) -> None:
    assert counted(number, "error") == text


def test_an_irregular_plural_is_given() -> None:
    assert [counted(number, "row waits", "rows wait") for number in (1, 2)] == ["1 row waits", "2 rows wait"]


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (None, "-"),
        (-0.3, "0 ms"),
        (0, "0 ms"),
        (0.0124, "12 ms"),
        (0.9994, "999 ms"),
        (0.9996, "1 s"),
        (3.44, "3.4 s"),
        (59.94, "59.9 s"),
        (59.96, "1 min"),
        (90, "1.5 min"),
        (3_599, "1 h"),
        (2 * 86_400 - 1, "2 d"),
        (5_000 * 86_400, "5,000 d"),
    ],
)
def test_duration_is_formatted_in_a_suitable_unit(seconds: float | None, shown: str) -> None:
    assert format_duration(seconds) == shown
