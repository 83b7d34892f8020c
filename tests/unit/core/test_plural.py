from __future__ import annotations

import pytest

from housekeeping.core.wording import counted


@pytest.mark.parametrize(
    ("number", "text"), [(0, "0 errors"), (1, "1 error"), (2, "2 errors"), (1_234, "1,234 errors")]
)
def test_one_is_singular_and_all_else_is_plural(number: int, text: str) -> None:
    assert counted(number, "error") == text


def test_an_irregular_plural_is_given() -> None:
    assert [counted(number, "row waits", "rows wait") for number in (1, 2)] == ["1 row waits", "2 rows wait"]
