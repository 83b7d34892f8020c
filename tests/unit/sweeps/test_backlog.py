"""Oldest and newest rows of several stages."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from tests.internals.insight import first_of

_EARLY, _LATE = datetime(2026, 3, 1, tzinfo=UTC), datetime(2026, 3, 2, tzinfo=UTC)


@pytest.mark.parametrize(
    ("values", "least", "most"),
    [
        ([], None, None),
        ([None, None], None, None),
        ([_LATE, None, _EARLY], _EARLY, _LATE),
        ([_LATE, 3, _EARLY], _EARLY, _LATE),
        ([3, _LATE, _EARLY], 3, 3),
    ],
)
def test_stages_ordered_by_different_types_are_not_compared(values: list[Any], least: Any, most: Any) -> None:
    assert (first_of(values), first_of(values, max)) == (least, most)
